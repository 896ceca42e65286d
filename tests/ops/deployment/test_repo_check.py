"""`gateway repo check`: a right repository has no findings, a planted mistake just its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ops.deployment import repository
from ops.deployment.check import check
from ops.deployment.check_repository import RepositoryError
from tests.support.triton_server import MODEL
from triton_repo.cpu_executor import engine

Found = tuple[str, str, str]
"""Severity, model, field."""


@dataclass(frozen=True)
class Place:
    """One rendered repository with its engine and its tokenizer."""

    folder: Path

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def engine(self) -> Path:
        return self.folder / "engine"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    def edit(self, model: str, old: str, new: str) -> None:
        """Replaces text that must be there in a config.pbtxt."""
        path = self.repository / model / "config.pbtxt"
        text = path.read_text()
        assert old in text, old
        path.write_text(text.replace(old, new))

    def set(self, model: str, key: str, value: str) -> None:
        """Writes a parameter that the config.pbtxt has."""
        head = f'parameters {{ key: "{key}" value {{ string_value: "'
        path = self.repository / model / "config.pbtxt"
        before, found, after = path.read_text().partition(head)
        assert found, key
        path.write_text(before + head + value + '"' + after.partition('"')[2])

    def add(self, model: str, key: str, value: str) -> None:
        """Adds a parameter that this release does not have."""
        with (self.repository / model / "config.pbtxt").open("a") as file:
            file.write(f'\nparameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n')

    def build(self, section: str, **changes: Any) -> None:
        """Changes a section of the engine's config.json, such as `build_config.plugin_config`."""
        path = self.engine / "config.json"
        config = json.loads(path.read_text())
        part = config
        for name in section.split("."):
            part = part[name]
        part.update(changes)
        path.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def cpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine.build(
        MODEL,
        tmp_path_factory.mktemp("cpu") / "engine",
        max_batch_size=16,
        max_beam_width=4,
        max_input_len=1024,
        lora_target_modules=engine.LLAMA_LORA_MODULES,
    )


@pytest.fixture
def place(cpu_engine: Path, tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.engine.mkdir()
    shutil.copyfile(cpu_engine / "config.json", made.engine / "config.json")
    (made.engine / "model.safetensors").symlink_to(cpu_engine / "model.safetensors")
    shutil.copytree(MODEL, made.tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    description = repository.from_fields(
        {
            "engine_dir": made.engine,
            "tokenizer_dir": made.tokenizer,
            "triton_backend": "python",
            "max_beam_width": 4,
            "max_queue_size": 64,
            "guided_decoding_backend": "xgrammar",
            "parameters": {"exclude_input_in_output": False},
        }
    )
    repository.write(description, made.repository)
    return made


def found(place: Place, **where: Path) -> set[Found]:
    return {(one.severity, one.model, one.field) for one in check(place.repository, **where)}


CORE, BLS, ENSEMBLE = "tensorrt_llm", "tensorrt_llm_bls", "ensemble"


@dataclass(frozen=True)
class Mistake:
    """`plant` makes it; `problem` and `fix` are words that the finding must say."""

    plant: Callable[[Place], object]
    finding: Found
    problem: str
    fix: str


def error(model: str, field: str) -> Found:
    return ("error", model, field)


def warning(model: str, field: str) -> Found:
    return ("warning", model, field)


def note(model: str, field: str) -> Found:
    return ("note", model, field)


def _not_decoupled(place: Place) -> None:
    for model in (CORE, BLS):
        place.edit(model, "decoupled: true", "decoupled: false")


def _bfloat16_engine(place: Place) -> None:
    place.build("pretrained_config", dtype="bfloat16")
    place.build("build_config.plugin_config", lora_plugin="auto")


def _no_lora_in_ensemble(place: Place) -> None:
    for name in ("lora_task_id", "lora_weights", "lora_config"):
        path = place.repository / ENSEMBLE / "config.pbtxt"
        lines = [line for line in path.read_text().splitlines() if f'"{name}"' not in line]
        path.write_text("\n".join(lines))


def _old_text_names(place: Place) -> None:
    """The core model of a newer release beside the BLS of an older one."""
    place.edit(CORE, '"min_length"', '"min_tokens"')
    place.edit(ENSEMBLE, 'key: "min_length"', 'key: "min_tokens"')


def _gpu_engine(place: Place) -> None:
    """An engine for two GPUs of which one file is missing."""
    (place.engine / "model.safetensors").unlink()
    (place.engine / "rank0.engine").touch()
    place.build("pretrained_config.mapping", world_size=2, tp_size=2)


def _cxx_backend(place: Place) -> None:
    place.edit(CORE, 'backend: "python"', 'backend: "tensorrtllm"')
    (place.engine / "rank0.engine").touch()


def _no_chat_template(place: Place) -> None:
    path = place.tokenizer / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert config.pop("chat_template")
    path.write_text(json.dumps(config))


def _unset_fraction(place: Place) -> None:
    place.set(CORE, "kv_cache_free_gpu_mem_fraction", "${kv_cache_free_gpu_mem_fraction}")


MISTAKES: dict[str, Mistake] = {
    "streaming without decoupled": Mistake(
        _not_decoupled,
        warning(CORE, "decoupled_mode"),
        "every streaming request fails",
        "decoupled: true",
    ),
    "BLS not decoupled like the core": Mistake(
        lambda place: place.edit(BLS, "decoupled: true", "decoupled: false"),
        error(BLS, "decoupled_mode"),
        "false here, true in tensorrt_llm",
        "set decoupled: true in tensorrt_llm_bls",
    ),
    "a number left unfilled": Mistake(
        lambda place: place.edit(CORE, "max_queue_size: 64", "max_queue_size: ${max_queue_size}"),
        error(CORE, "max_queue_size"),
        "cannot parse config.pbtxt",
        '"max_queue_size:VALUE"',
    ),
    "a type left unfilled": Mistake(
        lambda place: place.edit(
            BLS, '"context_logits" data_type: TYPE_FP32', '"context_logits" data_type: ${logits}'
        ),
        error(BLS, "logits"),
        "${logits} is unfilled",
        "gateway repo fill -i",
    ),
    "the backend left unfilled": Mistake(
        lambda place: place.edit(CORE, 'backend: "python"', 'backend: "${triton_backend}"'),
        error(CORE, "triton_backend"),
        "no backend of that name",
        "triton_backend:tensorrtllm",
    ),
    "an optional parameter left unfilled": Mistake(
        _unset_fraction,
        note(CORE, "parameters"),
        "means not set: kv_cache_free_gpu_mem_fraction",
        "server's defaults",
    ),
    "the engine's folder left unfilled": Mistake(
        lambda place: place.set(CORE, "gpt_model_path", "${engine_dir}"),
        error(CORE, "engine_dir"),
        "gpt_model_path is not set",
        '"engine_dir:VALUE"',
    ),
    "a batching strategy that does not exist": Mistake(
        lambda place: place.set(CORE, "gpt_model_type", "inflight"),
        error(CORE, "batching_strategy"),
        "Invalid gpt_model_type",
        "inflight_fused_batching",
    ),
    "LoRA weights of another type than the engine's": Mistake(
        _bfloat16_engine,
        error(CORE, "lora_weights_data_type"),
        "declared TYPE_FP16",
        "declare TYPE_BF16",
    ),
    "a LoRA host cache below one adapter": Mistake(
        lambda place: place.set(CORE, "lora_cache_host_memory_bytes", "1000000"),
        error(CORE, "lora_cache_host_memory_bytes"),
        "Not enough space allocated to host LoRA cache",
        "at least 3145728",
    ),
    "LoRA settings on an engine without LoRA": Mistake(
        lambda place: (
            place.build("build_config.plugin_config", lora_plugin=None),
            place.set(CORE, "lora_cache_max_adapter_size", "16"),
        ),
        error(CORE, "lora_cache_max_adapter_size"),
        "no LoRA plugin",
        "--lora_plugin auto",
    ),
    "enable_trt_overlap": Mistake(
        lambda place: place.add(CORE, "enable_trt_overlap", "true"),
        warning(CORE, "enable_trt_overlap"),
        "deprecated",
        "remove it",
    ),
    "max_kv_cache_length": Mistake(
        lambda place: place.add(CORE, "max_kv_cache_length", "4096"),
        warning(CORE, "max_kv_cache_length"),
        "renamed in v0.7",
        "max_attention_window_size",
    ),
    "max_num_sequences": Mistake(
        lambda place: place.add(CORE, "max_num_sequences", "64"),
        warning(CORE, "max_num_sequences"),
        "limits nothing",
        "max_queue_size",
    ),
    "worker_path with the Python backend": Mistake(
        lambda place: place.add(CORE, "worker_path", "/opt/worker"),
        error(CORE, "worker_path"),
        "refuses to load",
        "executor_worker_path",
    ),
    "tokenizer_type": Mistake(
        lambda place: place.add("preprocessing", "tokenizer_type", "auto"),
        warning("preprocessing", "tokenizer_type"),
        "removed in v0.9",
        "remove it",
    ),
    "a step's model is not there": Mistake(
        lambda place: (
            shutil.rmtree(place.repository / "postprocessing"),
            shutil.rmtree(place.repository / BLS),
        ),
        error(ENSEMBLE, "postprocessing"),
        "does not load the ensemble",
        "add the folder postprocessing",
    ),
    "a model that BLS calls is not there": Mistake(
        lambda place: place.set(BLS, "tensorrt_llm_model_name", "llama"),
        error(BLS, "llama"),
        "called by it",
        "add the folder llama",
    ),
    "no version folder": Mistake(
        lambda place: shutil.rmtree(place.repository / ENSEMBLE / "1"),
        error(ENSEMBLE, "version folder"),
        "no folder 1",
        "create",
    ),
    "no model.py": Mistake(
        lambda place: (place.repository / "preprocessing" / "1" / "model.py").unlink(),
        error("preprocessing", "1/model.py"),
        "missing",
        "of the same release",
    ),
    "a file that is no model configuration": Mistake(
        lambda place: place.edit("postprocessing", "max_batch_size: 16", "max_batch_size 16"),
        error("postprocessing", "config.pbtxt"),
        "6:16",
        "correct the file",
    ),
    "a folder that is no model": Mistake(
        lambda place: (place.repository / "notes").mkdir(),
        error("notes", "config.pbtxt"),
        "the file is missing",
        "correct the file",
    ),
    "a folder with another name": Mistake(
        lambda place: place.edit("postprocessing", 'name: "postprocessing"', 'name: "post"'),
        error("postprocessing", "name"),
        "found 'post' in a folder called postprocessing",
        'name: "postprocessing"',
    ),
    "a missing rank": Mistake(
        _gpu_engine,
        error(CORE, "rank1.engine"),
        "world_size 2",
        "copy all files that trtllm-build wrote",
    ),
    "an engine folder that is not there": Mistake(
        lambda place: [
            place.set(model, "gpt_model_path", "/nowhere/engine")
            for model in (CORE, "preprocessing")
        ],
        error(CORE, "engine_dir"),
        "/nowhere/engine/config.json: No such file",
        "--engine-dir",
    ),
    "a Hugging Face folder as engine": Mistake(
        lambda place: [
            place.set(model, "gpt_model_path", str(place.tokenizer))
            for model in (CORE, "preprocessing")
        ],
        error(CORE, "engine_dir"),
        "Hugging Face model, not an engine",
        "correct engine_dir",
    ),
    "two engines": Mistake(
        lambda place: place.set("preprocessing", "gpt_model_path", "/models/other"),
        warning("preprocessing", "engine_dir"),
        "/models/other, but the engine served is in",
        "the same folder",
    ),
    "two tokenizers": Mistake(
        lambda place: place.set("postprocessing", "tokenizer_dir", str(MODEL)),
        error("postprocessing", "tokenizer_dir"),
        "token ids of one are not those of the other",
        "the same folder",
    ),
    "a tokenizer that is not there": Mistake(
        lambda place: place.tokenizer.rename(place.folder / "moved"),
        error("preprocessing", "tokenizer_dir"),
        "is not a folder",
        "--tokenizer-dir",
    ),
    "a tokenizer without chat template": Mistake(
        _no_chat_template,
        note("preprocessing", "tokenizer_dir"),
        "no chat template",
        "chat_template.jinja",
    ),
    "a batch above the engine's": Mistake(
        lambda place: place.build("build_config", max_batch_size=8),
        error(CORE, "triton_max_batch_size"),
        "found 16",
        "set triton_max_batch_size:8",
    ),
    "beams above the engine's": Mistake(
        lambda place: place.build("build_config", max_beam_width=1),
        error(CORE, "max_beam_width"),
        "says max_beam_width 1",
        "--max_beam_width 4",
    ),
    "logits of another type": Mistake(
        lambda place: place.build("pretrained_config", logits_dtype="float16"),
        error(CORE, "logits_datatype"),
        "declared TYPE_FP32",
        "declare TYPE_FP16",
    ),
    "KV cache reuse without paged context attention": Mistake(
        lambda place: place.build("build_config.plugin_config", use_paged_context_fmha=False),
        error(CORE, "enable_kv_cache_reuse"),
        "use_paged_context_fmha false",
        "--use_paged_context_fmha enable",
    ),
    "chunked context without a paged cache": Mistake(
        lambda place: (
            place.build("build_config", kv_cache_type="CONTINUOUS"),
            place.set(CORE, "enable_kv_cache_reuse", "false"),
            place.set(CORE, "enable_chunked_context", "true"),
        ),
        error(CORE, "enable_chunked_context"),
        "not paged",
        "--kv_cache_type paged",
    ),
    "host memory for blocks that are never reused": Mistake(
        lambda place: (
            place.set(CORE, "enable_kv_cache_reuse", "false"),
            place.set(CORE, "kv_cache_host_memory_bytes", "1000000000"),
        ),
        error(CORE, "kv_cache_host_memory_bytes"),
        "never used",
        "enable_kv_cache_reuse:true",
    ),
    "max_utilization without chunked context": Mistake(
        lambda place: place.set(CORE, "batch_scheduler_policy", "max_utilization"),
        warning(CORE, "batch_scheduler_policy"),
        "max_input_len (1024)",
        "enable_chunked_context:true",
    ),
    "one BLS": Mistake(
        lambda place: place.edit(BLS, "count: 4", "count: 1"),
        warning(BLS, "bls_instance_count"),
        "one request at a time",
        "bls_instance_count",
    ),
    "two postprocessings": Mistake(
        lambda place: place.edit("postprocessing", "count: 1", "count: 2"),
        warning("postprocessing", "postprocessing_instance_count"),
        "out of order",
        "postprocessing_instance_count:1",
    ),
    "one preprocessing": Mistake(
        lambda place: place.edit("preprocessing", "count: 2", "count: 1"),
        note("preprocessing", "preprocessing_instance_count"),
        "one process tokenizes",
        "preprocessing_instance_count:2",
    ),
    "a queue without bound": Mistake(
        lambda place: place.edit(CORE, "max_queue_size: 64", "max_queue_size: 0"),
        note(CORE, "max_queue_size"),
        "no bound",
        "max_queue_size",
    ),
    "exclude_input_in_output not set": Mistake(
        lambda place: place.set(CORE, "exclude_input_in_output", ""),
        note(CORE, "exclude_input_in_output"),
        "begin with the prompt",
        "exclude_input_in_output:true",
    ),
    "guided decoding without a tokenizer": Mistake(
        lambda place: place.set(CORE, "tokenizer_dir", ""),
        error(CORE, "guided_decoding_backend"),
        "tokenizer_dir is not set",
        "the tokenizer's folder",
    ),
    "guided decoding in C++ without the tokenizer's file": Mistake(
        _cxx_backend,
        error(CORE, "guided_decoding_backend"),
        "xgrammar_tokenizer_info_path is not set",
        "generate_xgrammar_tokenizer_info.py",
    ),
    "an ensemble from before LoRA": Mistake(
        _no_lora_in_ensemble,
        warning(ENSEMBLE, "lora_task_id"),
        "before v0.15",
        "take ensemble from v0.15 or later",
    ),
    "an ensemble of an older release": Mistake(
        lambda place: (
            shutil.rmtree(place.repository / BLS),
            place.edit(CORE, '"random_seed"', '"seed"'),
        ),
        error(ENSEMBLE, "random_seed"),
        "different releases",
        "the model's name for it is seed",
    ),
    "a BLS of an older release": Mistake(
        _old_text_names,
        error(BLS, "min_length"),
        "tensorrt_llm calls this tensor min_tokens",
        "one release",
    ),
    "an ensemble with another type": Mistake(
        lambda place: place.edit(
            ENSEMBLE, '"lora_weights" data_type: TYPE_FP16', '"lora_weights" data_type: TYPE_BF16'
        ),
        error(ENSEMBLE, "lora_weights"),
        "TYPE_BF16 here, TYPE_FP16 as lora_weights of tensorrt_llm",
        "one type",
    ),
    "an ensemble with another type of output": Mistake(
        lambda place: place.edit(
            ENSEMBLE,
            '"generation_logits" data_type: TYPE_FP32',
            '"generation_logits" data_type: TYPE_FP16',
        ),
        error(ENSEMBLE, "generation_logits"),
        "TYPE_FP32 in the model that makes it",
        "one type",
    ),
    "a BLS with another type": Mistake(
        lambda place: place.edit(
            BLS, '"lora_weights" data_type: TYPE_FP16', '"lora_weights" data_type: TYPE_BF16'
        ),
        error(BLS, "lora_weights"),
        "requests with LoRA weights fail",
        "declare TYPE_FP16",
    ),
    "static batching that streams": Mistake(
        lambda place: (
            place.set(CORE, "gpt_model_type", "V1"),
            place.set(CORE, "enable_kv_cache_reuse", "false"),
            place.set(CORE, "guided_decoding_backend", ""),
        ),
        warning(CORE, "batching_strategy"),
        "in one piece",
        "inflight_fused_batching",
    ),
    "no core model": Mistake(
        lambda place: [shutil.rmtree(place.repository / name) for name in (CORE, BLS, ENSEMBLE)],
        error("", CORE),
        "nothing that runs an engine",
        "gateway repo render",
    ),
}


def test_a_right_repository_has_no_findings(place: Place) -> None:
    assert check(place.repository) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_with_its_fix(place: Place, name: str) -> None:
    mistake = MISTAKES[name]
    mistake.plant(place)
    findings = check(place.repository)
    assert [(one.severity, one.model, one.field) for one in findings] == [mistake.finding]
    assert mistake.problem in findings[0].problem
    assert mistake.fix in findings[0].fix


def test_static_batching_with_what_only_inflight_batching_has(place: Place) -> None:
    place.set(CORE, "gpt_model_type", "V1")
    assert found(place) == {
        error(CORE, "enable_kv_cache_reuse"),
        error(CORE, "guided_decoding_backend"),
        warning(CORE, "batching_strategy"),
    }


def test_a_repository_for_another_machine_is_checked_with_local_folders(place: Place) -> None:
    for model in (CORE, "preprocessing"):
        place.set(model, "gpt_model_path", "/models/engine")
    for model in ("preprocessing", "postprocessing", CORE):
        place.set(model, "tokenizer_dir", "/models/tokenizer")
    assert found(place) == {
        error(CORE, "engine_dir"),
        error("preprocessing", "tokenizer_dir"),
    }
    where = {"engine_dir": place.engine, "tokenizer_dir": place.tokenizer}
    assert found(place, **where) == set()
    place.build("build_config", max_batch_size=8)
    assert found(place, **where) == {error(CORE, "triton_max_batch_size")}


def test_the_model_whose_tokenizer_is_not_there_is_named(place: Place) -> None:
    place.set("postprocessing", "tokenizer_dir", "/nowhere")
    findings = check(place.repository)
    assert {(one.severity, one.model, one.field) for one in findings} == {
        error("postprocessing", "tokenizer_dir")
    }
    assert any("/nowhere is not a folder" in one.problem for one in findings)


def test_a_chat_template_may_be_a_file_of_its_own(place: Place) -> None:
    _no_chat_template(place)
    (place.tokenizer / "chat_template.jinja").touch()
    assert check(place.repository) == []


def test_a_prompt_may_fill_the_context_so_max_utilization_refuses_nothing(place: Place) -> None:
    place.set(CORE, "batch_scheduler_policy", "max_utilization")
    place.build("build_config", max_input_len=2048)
    assert found(place) == set()


def test_a_draft_model_is_a_core_model_that_the_ensemble_does_not_use(place: Place) -> None:
    draft = place.repository / "draft"
    shutil.copytree(place.repository / CORE, draft)
    place.edit("draft", 'name: "tensorrt_llm"', 'name: "draft"')
    place.set(BLS, "tensorrt_llm_draft_model_name", "draft")
    assert check(place.repository) == []
    _no_lora_in_ensemble(place)
    assert [one.model for one in check(place.repository)] == [ENSEMBLE]
    place.set("draft", "gpt_model_type", "")
    assert error("draft", "batching_strategy") in found(place)


def test_engines_before_v08_have_other_file_names(place: Place) -> None:
    (place.engine / "model.safetensors").unlink()
    (place.engine / "llama_float16_tp1_rank0.engine").touch()
    assert found(place) == set()


def test_the_llm_api_repository_is_told_apart(place: Place) -> None:
    for name in (BLS, ENSEMBLE):
        shutil.rmtree(place.repository / name)
    (place.repository / CORE / "1" / "model.yaml").touch()
    (place.repository / CORE / "config.pbtxt").write_text(
        'backend: "python" input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]'
    )
    findings = check(place.repository)
    assert "LLM API" in next(one.problem for one in findings if one.field == CORE)


def test_a_single_quoted_hole_is_a_string(place: Place) -> None:
    place.add(CORE, "x", "y")
    place.edit(CORE, 'string_value: "y"', "string_value: '${y}' # ${z}\n")
    assert found(place) == {note(CORE, "parameters")}


def _command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops", "repo", "check", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
        timeout=60,
    )


def test_the_command_prints_findings_and_says_errors_by_its_exit_code(place: Place) -> None:
    place.edit(BLS, "count: 4", "count: 1")
    answer = _command(place.repository)
    assert answer.returncode == 0
    assert answer.stdout.splitlines() == [
        "warning  tensorrt_llm_bls: bls_instance_count",
        "         1: it serves one request at a time, and all others wait",
        "         fix: set bls_instance_count to the number of requests that run at once",
        "errors: 0, warnings: 1, notes: 0",
    ]
    place.build("build_config", max_batch_size=8)
    answer = _command(place.repository, "--json")
    assert answer.returncode == 1
    findings = json.loads(answer.stdout)["findings"]
    assert [(one["severity"], one["field"]) for one in findings] == [
        ("error", "triton_max_batch_size"),
        ("warning", "bls_instance_count"),
    ]


def test_what_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="no such folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(RepositoryError, match=r"no folder in it has a config\.pbtxt"):
        check(tmp_path)
    answer = _command(tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.startswith("gateway repo check: ")
