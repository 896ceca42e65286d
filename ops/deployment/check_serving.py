"""Rules that check whether the models of a repository will serve requests as intended.

The rules check the decoupled mode, the queue limit, instance counts, the folders of the engine and
the tokenizer, and parameters that TensorRT-LLM has renamed or removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from adapters.config_json import ConfigError
from adapters.engine_config import EngineConfig, read_engine_config
from adapters.file_kinds import kind_of_file
from adapters.model_files import tokenizer_problems
from ops.deployment.check_engine import engine_findings
from ops.deployment.check_findings import Finding, Severity
from ops.deployment.check_repository import LocalFolders, Repository, RepositoryModel
from triton_repo.parameters import BLS, POSTPROCESSING, PREPROCESSING

_TOKENIZER_CONFIG = "tokenizer_config.json"
# Weights file of an engine for the CPU executor. Such an engine has no rankN.engine files.
_CPU_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class _Outdated:
    key: str
    problem: str
    fix: str
    severity: Severity = "warning"


_OUTDATED = (
    _Outdated(
        "enable_trt_overlap",
        "deprecated: it has no effect, and the newest Python backend refuses true",
        "remove it",
    ),
    _Outdated(
        "max_kv_cache_length",
        "renamed in v0.7: the attention window is not limited",
        "call it max_attention_window_size",
    ),
    _Outdated(
        "max_num_sequences",
        "removed in v0.8: it limits nothing",
        "remove it; the engine's max_batch_size bounds the batch and max_queue_size the queue",
    ),
    _Outdated(
        "tokenizer_type",
        "removed in v0.9: the tokenizer is found from its folder",
        "remove it",
    ),
)


def serving_findings(repository: Repository, places: LocalFolders) -> list[Finding]:
    found: list[Finding] = []
    for core in repository.cores:
        found += _check_decoupled(repository, core)
        found += _check_core_parameters(core)
        found += _check_engine(core, places)
    for model in repository.models.values():
        found += _check_outdated(model)
        # Do not check instance counts in the GPT repository: its templates do not set them, and
        # several postprocessing instances could only reorder streamed answers, which this
        # repository does not have.
        if not any(core.is_gpt for core in repository.cores):
            found += _check_instances(model)
    found += _check_same_engine(repository)
    found += _check_tokenizers(repository, places)
    return found


def _check_decoupled(repository: Repository, core: RepositoryModel) -> Iterator[Finding]:
    assert core.file is not None
    if core.is_gpt:
        yield Finding(
            "note",
            core.name,
            "decoupled_mode",
            "the GPT repository: no answer is streamed, and one batch runs after another",
            "render inflight_batcher_llm where clients stream or many ask at once",
        )
        return
    if not core.file.decoupled:
        yield Finding(
            "warning",
            core.name,
            "decoupled_mode",
            "false: every streaming request fails with "
            '"Streaming is only supported if model is deployed using decoupled mode"',
            "to stream, set model_transaction_policy { decoupled: true } here and in "
            "tensorrt_llm_bls",
        )
    for model in repository.bls_models:
        assert model.file is not None
        name = model.parameter("tensorrt_llm_model_name") or "tensorrt_llm"
        if name == core.name and model.file.decoupled != core.file.decoupled:
            mine, other = (str(file.decoupled).lower() for file in (model.file, core.file))
            yield Finding(
                "error",
                model.name,
                "decoupled_mode",
                f"{mine} here, {other} in {core.name}: streaming through {model.name} fails",
                f"set decoupled: {other} in {model.name}",
            )


def _check_core_parameters(core: RepositoryModel) -> Iterator[Finding]:
    assert core.file is not None
    # The GPT repository's templates do not have the parameters that are checked below.
    if core.is_gpt:
        return
    if core.file.max_queue_size == 0 and "max_queue_size" not in core.file.holes:
        yield Finding(
            "note",
            core.name,
            "max_queue_size",
            "0 or not set: the queue has no bound, so under overload all requests wait longer "
            "and none is refused",
            "set max_queue_size to what may wait, such as four full batches",
        )
    if not core.parameter("exclude_input_in_output"):
        yield Finding(
            "note",
            core.name,
            "exclude_input_in_output",
            "not set: answers that are not streamed begin with the prompt, "
            "unless the request says otherwise",
            "set exclude_input_in_output:true where clients do not expect the prompt",
        )
    if "worker_path" in core.file.parameters:
        python = core.file.backend == "python"
        yield Finding(
            "error" if python else "warning",
            core.name,
            "worker_path",
            "replaced by executor_worker_path in v0.12: "
            + ("the Python backend refuses to load" if python else "it has no effect"),
            "remove it, or call it executor_worker_path",
        )


def _check_outdated(model: RepositoryModel) -> Iterator[Finding]:
    for old in _OUTDATED:
        if model.parameter(old.key):
            value = model.parameter(old.key)
            yield Finding(
                old.severity, model.name, old.key, f"found {value}: {old.problem}", old.fix
            )


def _check_instances(model: RepositoryModel) -> Iterator[Finding]:
    if model.file is None:
        return
    if model.name == POSTPROCESSING and model.file.instance_count > 1:
        yield Finding(
            "warning",
            model.name,
            "postprocessing_instance_count",
            f"{model.file.instance_count}: the pieces of one streamed answer are decoded side by "
            "side, and clients of the ensemble may get them out of order",
            "set postprocessing_instance_count:1",
        )
    if model.file.instance_count != 1:
        return
    if model.name == BLS:
        yield Finding(
            "warning",
            model.name,
            "bls_instance_count",
            "1: it serves one request at a time, and all others wait",
            "set bls_instance_count to the number of requests that run at once",
        )
    if model.name == PREPROCESSING:
        yield Finding(
            "note",
            model.name,
            "preprocessing_instance_count",
            "1: one process tokenizes for every request of the text interface",
            "set preprocessing_instance_count:2 or more where the text interface has load",
        )


def _check_engine(core: RepositoryModel, places: LocalFolders) -> Iterator[Finding]:
    assert core.file is not None
    folder = places.engine(core)
    if folder is None:
        return
    try:
        engine = read_engine_config(folder)
    except ConfigError as error:
        yield Finding(
            "error",
            core.name,
            "engine_dir",
            f"the model does not load: {error}",
            "correct engine_dir; if it is right where Triton runs, give --engine-dir here",
        )
        return
    yield from engine_findings(core.values(), engine, folder)
    yield from _check_ranks(core, engine, folder)


def _check_same_engine(repository: Repository) -> Iterator[Finding]:
    """Yield a warning if preprocessing names another engine than the models that run an engine.

    Preprocessing reads the engine's config.json to build the prompts of models with image input.
    """
    named = {model.parameter("gpt_model_path") for model in repository.cores} - {""}
    preprocessing = repository.models.get(PREPROCESSING)
    folder = preprocessing.parameter("gpt_model_path") if preprocessing else ""
    if folder and named and folder not in named:
        yield Finding(
            "warning",
            PREPROCESSING,
            "engine_dir",
            f"{folder}, but the engine served is in {', '.join(sorted(named))}: prompts are made "
            "for another engine",
            "give both models the same folder",
        )


def _check_ranks(core: RepositoryModel, engine: EngineConfig, folder: Path) -> Iterator[Finding]:
    assert core.file is not None
    if core.file.backend != "tensorrtllm" and (folder / _CPU_WEIGHTS).is_file():
        return
    expected = engine.world_size or 1
    # Accept file names with any text before "rank". Up to v0.7, the name of an engine file begins
    # with the model's name, its data type and its parallelism.
    present = {path.stem.rpartition("rank")[2] for path in folder.glob("*rank*.engine")}
    for path in sorted(folder.glob("*rank*.engine")):
        if (kind := kind_of_file(path)) is not None:
            problem = f"{path} is {kind.name}: the model does not load"
            yield Finding("error", core.name, path.name, problem, kind.fix)
    missing = [f"rank{rank}.engine" for rank in range(expected) if str(rank) not in present]
    if missing:
        yield Finding(
            "error",
            core.name,
            missing[0],
            f"{folder} lacks {', '.join(missing)}, and its config.json says world_size {expected}: "
            "the model does not load",
            "copy all files that trtllm-build wrote, or build the engine again",
        )


def _check_tokenizers(repository: Repository, places: LocalFolders) -> Iterator[Finding]:
    # Skip llmapi models: they load the tokenizer of their model.yaml, and their parameter
    # `tokenizer_dir` is only information for clients.
    named = {
        model.name: model.parameter("tokenizer_dir")
        for model in repository.models.values()
        if model.parameter("tokenizer_dir") and not model.is_llmapi
    }
    first = next((name for name in (PREPROCESSING, *named) if name in named), "")
    for model, folder in named.items():
        if folder == named[first]:
            continue
        yield Finding(
            "error",
            model,
            "tokenizer_dir",
            f"{folder}, but {first} has {named[first]}: token ids of one are not those of the "
            "other",
            "give all models the same folder",
        )
    for folder in dict.fromkeys(named.values()):
        here = places.tokenizer_dir or Path(folder)
        order = (PREPROCESSING, POSTPROCESSING, *named)
        model = next(name for name in order if named.get(name) == folder)
        if not here.is_dir():
            yield Finding(
                "error",
                model,
                "tokenizer_dir",
                f"{here} is not a folder: the model does not load",
                "correct it; if it is right where Triton runs, give --tokenizer-dir here",
            )
            continue
        for problem in tokenizer_problems(here):
            found = f"{problem.found}: the model does not load"
            yield Finding("error", model, "tokenizer_dir", found, problem.fix)
        if not has_chat_template(here):
            yield Finding(
                "note",
                model,
                "tokenizer_dir",
                f"{here} has no chat template: /v1/chat/completions cannot be served, "
                "only /v1/completions",
                "use the folder of the chat model, or add chat_template.jinja to it",
            )


def has_chat_template(folder: Path) -> bool:
    """Return True if a Hugging Face folder has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / _TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
