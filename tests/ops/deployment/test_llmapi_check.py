"""`gateway repo check` of the llmapi repository: each planted mistake is found, and no other."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.deployment.check import check
from ops.deployment.llmapi_repository import write_llmapi
from tests.support.commands import gateway
from tests.support.repositories import CORE, FindingKey, error, note, warning
from tests.support.triton_server import MODEL

ADAPTER = MODEL.parent / "adapters" / "zh"  # rank 16
# The value is never used: only its presence marks a repository of several GPUs.
TWO_INSTANCES = 'name: "tensorrt_llm"\nparameters { key: "gpu_device_ids" value { string_value: '


@dataclass(frozen=True)
class Place:
    """A repository of one model, into which tests plant mistakes."""

    repository: Path

    @property
    def model(self) -> Path:
        return self.repository / CORE

    @property
    def yaml(self) -> Path:
        return self.model / "1" / "model.yaml"

    def config(self, old: str, new: str) -> None:
        _replace(self.model / "config.pbtxt", old, new)

    def arguments(self, old: str, new: str) -> None:
        _replace(self.yaml, old, new)

    def without_inputs(self, names: str) -> None:
        path = self.model / "config.pbtxt"
        text, count = re.subn(rf'(?m)^  {{ name: "({names})" .*\n', "", path.read_text())
        assert count
        path.write_text(text.replace(",\n]", "\n]"))

    def instances(self, count: int, gpus: str = "") -> None:
        self.config("count: 1 kind", f"count: {count} kind")
        if gpus:
            self.config('name: "tensorrt_llm"', f'{TWO_INSTANCES}"{gpus}" }} }}')

    def found(self, *adapters: Path) -> set[FindingKey]:
        findings = check(self.repository, adapters=adapters)
        return {(one.severity, one.model, one.field) for one in findings}


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new, 1))


def rendered(folder: Path, **parameters: str) -> Place:
    given = {
        "max_seq_len": "1024",
        "lora_target_modules": "attn_q,attn_k,attn_v",
        "max_lora_rank": "16",
        "max_loras": "2",
        "max_cpu_loras": "4",
    }
    write_llmapi({"model": str(MODEL), "parameters": given | parameters}, folder)
    return Place(folder)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = rendered(tmp_path / "repository")
    made.arguments('  behaves_as: "main"\n', "")
    made.arguments("  decoupled: true\n", "  decoupled: true\n  multimodal: true\n")
    return made


def _no_yaml(place: Place) -> None:
    place.yaml.rename(place.yaml.with_name("config.yaml"))


MULTIMODAL = warning(CORE, "triton_config.multimodal")
"""The finding of an unchanged `place`: a model with image input downloads the images."""


@dataclass(frozen=True)
class Mistake:
    """A mistake that `plant` makes. The finding's text must contain `problem` and `fix`."""

    plant: Callable[[Place], object]
    finding: FindingKey
    problem: str
    fix: str


MISTAKES: dict[str, Mistake] = {
    "decoupled in model.yaml alone": Mistake(
        lambda place: place.config("decoupled: true", "decoupled: false"),
        error(CORE, "model_transaction_policy"),
        "--disable-auto-complete-config, so that it reads config.pbtxt alone, and every streaming "
        "request fails, or is never answered",
        "model_transaction_policy { decoupled: true }",
    ),
    "decoupled not in config.pbtxt at all": Mistake(
        lambda place: place.config("model_transaction_policy { decoupled: true }", ""),
        error(CORE, "model_transaction_policy"),
        "config.pbtxt does not say decoupled, and model.yaml:",
        "model_transaction_policy { decoupled: true }",
    ),
    "decoupled in config.pbtxt alone": Mistake(
        lambda place: place.arguments("decoupled: true", "decoupled: false"),
        error(CORE, "triton_config.decoupled"),
        "model.yaml:20: false, but config.pbtxt says decoupled",
        "write decoupled: true here",
    ),
    "decoupled in neither": Mistake(
        lambda place: (
            place.config("decoupled: true", "decoupled: false"),
            place.arguments("decoupled: true", "decoupled: false"),
        ),
        warning(CORE, "model_transaction_policy"),
        "Streaming is only supported in decoupled mode",
        "to stream",
    ),
    "decoupled is a word": Mistake(
        lambda place: place.arguments("decoupled: true", "decoupled: 'True'"),
        error(CORE, "triton_config.decoupled"),
        "model.yaml:20: found 'True'",
        "decoupled: true",
    ),
    "no triton_config.decoupled": Mistake(
        lambda place: place.arguments("  decoupled: true\n", ""),
        error(CORE, "triton_config.decoupled"),
        "model.yaml:18: not there: model.py stops with KeyError",
        "write decoupled: true below triton_config:",
    ),
    "no triton_config.max_batch_size": Mistake(
        lambda place: place.arguments("  max_batch_size: 0\n", ""),
        error(CORE, "triton_config.max_batch_size"),
        "not there: model.py stops with KeyError",
        "write max_batch_size: 0",
    ),
    "a batch in triton_config": Mistake(
        lambda place: place.arguments("max_batch_size: 0", "max_batch_size: 8"),
        error(CORE, "triton_config.max_batch_size"),
        "model.yaml:19: found 8",
        "max_batch_size: 0",
    ),
    "a batch in config.pbtxt": Mistake(
        lambda place: place.config('backend: "python"', 'backend: "python"\nmax_batch_size: 8'),
        error(CORE, "max_batch_size"),
        "Expected a scalar tensor",
        "max_batch_size: 0",
    ),
    "a long time to a cancellation": Mistake(
        lambda place: place.arguments("period_ms: 100", "period_ms: 60000"),
        warning(CORE, "triton_config.cancellation_check_period_ms"),
        "whose client has left",
        "write 100",
    ),
    "no time to a cancellation": Mistake(
        lambda place: place.arguments("period_ms: 100", "period_ms: 100ms"),
        error(CORE, "triton_config.cancellation_check_period_ms"),
        "found '100ms'",
        "write 100",
    ),
    "images that nobody looks at": Mistake(
        lambda place: place.arguments("multimodal: true", "multimodal: false"),
        note(CORE, "image_url"),
        "an answer to the text alone",
        "multimodal: true",
    ),
    "a YAML file that is none": Mistake(
        lambda place: place.arguments("kv_cache_config:\n", "kv_cache_config: [\n"),
        error(CORE, "model.yaml"),
        "model.yaml:14: not YAML: ",
        "correct the file",
    ),
    "a key twice": Mistake(
        lambda place: place.arguments("backend: pytorch\n", "backend: pytorch\nbackend: x\n"),
        error(CORE, "model.yaml"),
        "model.yaml:5: backend: written twice",
        "correct the file",
    ),
    "no YAML file": Mistake(
        _no_yaml,
        error(CORE, "model.yaml"),
        "No such file",
        "gateway repo render --repository llmapi",
    ),
    "two instances on the same GPUs": Mistake(
        lambda place: place.instances(2),
        error(CORE, "gpu_device_ids"),
        "no gpu_device_ids",
        '"gpu_device_ids" value { string_value: "0;1" } }',
    ),
    "a list too few": Mistake(
        lambda place: place.instances(3, "0;1"),
        error(CORE, "gpu_device_ids"),
        "2 lists in gpu_device_ids",
        '"0;1;2"',
    ),
    "a GPU in two lists": Mistake(
        lambda place: place.instances(2, "0;0"),
        error(CORE, "gpu_device_ids"),
        "each once",
        '"0;1"',
    ),
    "lists shorter than an engine": Mistake(
        lambda place: (
            place.instances(2, "0;1"),
            place.arguments("tensor_parallel_size: 1", "tensor_parallel_size: 2"),
        ),
        error(CORE, "gpu_device_ids"),
        "model.yaml says 2 GPUs for each engine",
        '"0,1;2,3"',
    ),
    "GPUs of one instance": Mistake(
        lambda place: place.instances(1, "1"),
        warning(CORE, "gpu_device_ids"),
        "it is not looked at",
        "CUDA_VISIBLE_DEVICES",
    ),
    "an instance for each GPU": Mistake(
        lambda place: place.config("KIND_CPU", "KIND_GPU"),
        error(CORE, "instance_group"),
        "an instance for each GPU",
        "kind: KIND_CPU",
    ),
    "no instance group": Mistake(
        lambda place: place.config("instance_group [ { count: 1 kind: KIND_CPU } ]", ""),
        warning(CORE, "instance_group"),
        "Triton chooses",
        "kind: KIND_CPU",
    ),
    "a model folder that is a package": Mistake(
        lambda place: (place.model / "__init__.py").touch(),
        error(CORE, "tensorrt_llm/__init__.py"),
        "in place of TensorRT-LLM",
        "remove or rename it",
    ),
    "a source tree beside model.py": Mistake(
        lambda place: (place.model / "1" / "tensorrt_llm").mkdir(),
        error(CORE, "tensorrt_llm/1/tensorrt_llm"),
        "in place of TensorRT-LLM",
        "remove or rename it",
    ),
    "no model": Mistake(
        lambda place: place.arguments(f'model: "{MODEL}"', "model: null"),
        error(CORE, "model"),
        "model.yaml:2: found None: LLM needs it",
        "the Hugging Face folder",
    ),
    "a model that is not there": Mistake(
        lambda place: place.arguments(str(MODEL), "/nowhere"),
        error(CORE, "model"),
        "/nowhere holds no config.json",
        "--tokenizer-dir",
    ),
    "a model from the network": Mistake(
        lambda place: place.arguments(str(MODEL), "acme/llama"),
        note(CORE, "model"),
        "fetches it from Hugging Face",
        "the folder of a download",
    ),
    "a limit that nothing tells": Mistake(
        lambda place: place.arguments("max_seq_len: 1024", "max_seq_len: null"),
        note(CORE, "max_seq_len"),
        "the gateway does not start without it",
        "GATEWAY_MAX_SEQ_LEN",
    ),
    "prompts longer than a step": Mistake(
        lambda place: place.arguments("max_num_tokens: 8192", "max_num_tokens: 512"),
        warning(CORE, "max_num_tokens"),
        "should not exceed max_num_tokens",
        "enable_chunked_prefill: true",
    ),
    "guides that nobody can send": Mistake(
        lambda place: place.arguments(
            "backend: p", "guided_decoding_backend: xgrammar\nbackend: p"
        ),
        note(CORE, "guided_decoding_backend"),
        "no input for a schema",
        "remove it",
    ),
    "other blocks": Mistake(
        lambda place: place.arguments("  max_tokens: null", "  tokens_per_block: 64"),
        note(CORE, "kv_cache_config.tokens_per_block"),
        "model.yaml:15: found 64",
        "GATEWAY_TOKENS_PER_BLOCK=64",
    ),
    "adapters without lora_config": Mistake(
        lambda place: place.yaml.write_text(
            re.sub(r"lora_config: .*", "lora_config: null", place.yaml.read_text())
        ),
        note(CORE, "lora_config"),
        "every request with an adapter fails",
        "write lora_config: {lora_target_modules: ",
    ),
    "modules by PEFT's names": Mistake(
        lambda place: place.arguments("attn_q,attn_k", "q_proj,attn_k"),
        error(CORE, "lora_config.lora_target_modules"),
        "found q_proj",
        "q_proj of PEFT is attn_q",
    ),
    "a module of a later release": Mistake(
        lambda place: place.arguments("attn_q,attn_k", "mamba_in_proj,attn_k"),
        warning(CORE, "lora_config.lora_target_modules"),
        "found mamba_in_proj, which the gateway does not know",
        "the gateway knows attn_qkv, ",
    ),
    "no modules": Mistake(
        lambda place: place.arguments("lora_target_modules: [attn_q,attn_k,attn_v], ", ""),
        warning(CORE, "lora_config.lora_target_modules"),
        "which modules adapters will change",
        "[attn_q, attn_k, attn_v]",
    ),
    "fewer adapters on the host than on the GPU": Mistake(
        lambda place: place.arguments("max_cpu_loras: 4", "max_cpu_loras: 1"),
        warning(CORE, "lora_config.max_cpu_loras"),
        "bounds the GPU's",
        "at least 2",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_with_its_fix(place: Place, name: str) -> None:
    mistake = MISTAKES[name]
    mistake.plant(place)
    findings = check(place.repository)
    usual = {MULTIMODAL, note(CORE, "instance_group")} - {mistake.finding}
    [found] = [one for one in findings if (one.severity, one.model, one.field) not in usual]
    assert (found.severity, found.model, found.field) == mistake.finding
    assert mistake.problem in found.problem
    assert mistake.fix in found.fix


def test_what_takes_images_fetches_from_inside(place: Place) -> None:
    [only] = check(place.repository)
    assert (only.severity, only.model, only.field) == MULTIMODAL
    assert "those inside your network included" in only.problem
    assert "only the gateway" in only.fix


def test_instances_with_gpus_of_their_own_need_no_mpi(place: Place) -> None:
    place.instances(2, "0, 1; 2, 3")
    place.arguments("pipeline_parallel_size: 1", "pipeline_parallel_size: 2")
    assert place.found() == {MULTIMODAL, note(CORE, "instance_group")}
    texts = [one.fix for one in check(place.repository) if one.field == "instance_group"]
    assert "without MPI" in texts[0]


def test_releases_are_told_by_their_inputs(place: Place) -> None:
    """Check the inputs of 1.3, whose errors go unanswered, and of 1.2, without streams and
    adapters.
    """
    place.without_inputs("image_url")
    assert place.found() == {MULTIMODAL, note(CORE, "image_url")}
    place.without_inputs(r"lora_\w+")
    assert place.found() == {MULTIMODAL, note(CORE, "lora_id"), warning(CORE, "lora_config")}
    texts = [one.problem for one in check(place.repository) if one.field == "lora_id"]
    assert "in one piece" in texts[0]
    place.without_inputs("stop|sampling_param_best_of")
    assert place.found() == {MULTIMODAL, note(CORE, "stop"), warning(CORE, "lora_config")}


def test_a_release_that_the_gateway_does_not_know(place: Place) -> None:
    path = place.model / "config.pbtxt"
    path.write_text(path.read_text().replace("sampling_param_max_tokens", "max_tokens"))
    assert place.found() == {MULTIMODAL, error(CORE, "sampling_param_max_tokens")}


def test_this_projects_model_is_one_instance_and_takes_no_images(tmp_path: Path) -> None:
    place = rendered(tmp_path)
    assert place.found() == set()
    place.instances(2, "0;1")
    assert place.found() == {error(CORE, "instance_group")}


def test_adapters_that_shall_be_served(place: Place) -> None:
    assert place.found(ADAPTER) == {MULTIMODAL}
    place.arguments("max_lora_rank: 16", "max_lora_rank: 8")
    [found] = [one for one in check(place.repository, adapters=[ADAPTER]) if "rank" in one.field]
    assert found.severity == "error"
    assert f"found 8, but {ADAPTER} has rank 16" in found.problem
    assert found.fix == "write max_lora_rank: 16"
    place.yaml.write_text(re.sub(r"lora_config: .*", "lora_config:", place.yaml.read_text()))
    assert place.found(ADAPTER) == {MULTIMODAL, error(CORE, "lora_config")}


def test_an_adapter_that_is_none(place: Place, tmp_path: Path) -> None:
    assert place.found(tmp_path / "no") == {MULTIMODAL, error(CORE, str(tmp_path / "no"))}


def test_another_file_by_the_environment(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copyfile(place.yaml, tmp_path / "other.yaml")
    other.write_text(other.read_text().replace("max_batch_size: 0", "max_batch_size: 4"))
    monkeypatch.setenv("LLM_CONFIG_PATH", str(other))
    answer = gateway("repo", "check", place.repository)
    assert answer.returncode == 1
    assert "other.yaml:19: found 4" in answer.stdout
    assert f"set here: {other} was checked, and model.yaml is not looked at" in answer.stdout


def test_the_command_renders_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODEL.parent)
    rendering = ("repo", "render", "--repository", "llmapi", "--output", tmp_path / "r")
    answer = gateway(*rendering, "--model", "model", "-p", "max_seq_len=64", "-p", "max_loras=2")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("errors: 0, warnings: 1, notes: 0\n")
    yaml = (tmp_path / "r" / CORE / "1" / "model.yaml").read_text()
    assert f'model: "{MODEL}"' in yaml
    answer = gateway("repo", "check", tmp_path / "r", "--adapter", ADAPTER)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repository", "llmapi"], "model: found nothing"),
        (["--repository", "llmapi", "--engine-dir", "/e"], "engine_dir: unknown parameter"),
        (["--repository", "llmapi", "--description", "x"], "not with --repository llmapi"),
        (["--model", "x"], "--model: only with --repository llmapi"),
    ],
)
def test_what_render_does_not_take_is_named(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    answer = gateway("repo", "render", "--output", tmp_path / "r", *arguments)
    assert answer.returncode == 1
    assert message in answer.stderr
    assert not (tmp_path / "r").exists()
