"""Rules that check models of the llmapi repository: their model.yaml and their config.pbtxt.

Sources: `all_models/llmapi` of TensorRT-LLM's Triton backend, from release 1.2 to the main branch
of autumn 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway.triton.pbtxt import ModelFile
from ops.deployment.check_findings import Finding
from ops.deployment.check_llm_arguments import llm_findings
from ops.deployment.check_repository import LocalFolders, Repository, RepositoryModel
from ops.deployment.check_triton_config import triton_config_findings
from ops.deployment.llmapi_yaml import (
    LLM_CONFIG_PATH,
    MODEL_YAML,
    LlmapiYamlError,
    read_llmapi_yaml,
)

_ON_CPU = "instance_group [ { count: 1 kind: KIND_CPU } ]"
_PACKAGE = "tensorrt_llm"


def llmapi_findings(
    repository: Repository, places: LocalFolders, adapters: Sequence[Path], llm_config: str | None
) -> list[Finding]:
    """Return the findings on each model of the llmapi repository.

    Args:
        repository: the repository to check.
        adapters: PEFT folders to serve.
        llm_config: value of LLM_CONFIG_PATH in Triton's environment; None if unset.
    """
    found: list[Finding] = []
    for model in repository.llmapi_models:
        assert model.file is not None
        found += _check_tensors(model, model.file)
        found += _check_config(model, model.file)
        if not model.versions:
            continue
        found += _check_shadows(model)
        try:
            yaml = read_llmapi_yaml(model.versions[-1], llm_config)
        except LlmapiYamlError as error:
            found.append(_unread(model, str(error), llm_config))
            continue
        if llm_config:
            found.append(_elsewhere(model, llm_config))
        found += triton_config_findings(model, model.file, yaml)
        found += llm_findings(model, yaml, places, adapters)
    return found


def _unread(model: RepositoryModel, problem: str, llm_config: str | None) -> Finding:
    fix = (
        f"correct the file; gateway repo render --repository llmapi writes a complete {MODEL_YAML}"
    )
    if llm_config:
        fix = f"correct {LLM_CONFIG_PATH}, here and where Triton runs, or unset it"
    return Finding(
        *("error", model.name, MODEL_YAML, f"{problem}: model.py reads it first and stops", fix)
    )


def _elsewhere(model: RepositoryModel, llm_config: str) -> Finding:
    return Finding(
        "note",
        model.name,
        LLM_CONFIG_PATH,
        f"set here: {llm_config} was checked, and {MODEL_YAML} is not looked at",
        "see that it is set so where Triton runs; unset it where the model's own file is meant",
    )


def _check_tensors(model: RepositoryModel, config: ModelFile) -> Iterator[Finding]:
    needed = ("text_input", "sampling_param_max_tokens", "streaming")
    if missing := [name for name in needed if name not in config.inputs]:
        yield Finding(
            "error",
            model.name,
            missing[0],
            f"no input {', '.join(missing)}: config.pbtxt is not that of a release which the "
            "gateway drives (0.19 and later)",
            "take config.pbtxt and model.py from one release",
        )
    elif "stop" not in config.inputs:
        yield Finding(
            "note",
            model.name,
            "stop",
            "no input stop, so it is of TensorRT-LLM 0.19: what a client has left runs until the "
            "model looks for it, and adapters cannot be used",
            "take config.pbtxt, model.py and helpers.py from a release since 1.3",
        )
    elif "lora_id" not in config.inputs:
        yield Finding(
            "note",
            model.name,
            "lora_id",
            "no input lora_id, so it is of TensorRT-LLM 1.2 or older: adapters cannot be used, and "
            "a streamed answer comes in one piece at its end",
            "take config.pbtxt, model.py and helpers.py from a release since 1.3",
        )
    elif "image_url" not in config.inputs:
        yield Finding(
            "note",
            model.name,
            "image_url",
            "no input image_url, so it is of the 1.3 line before September 2026: a request that "
            "fails before the engine has it is never answered",
            "the gateway checks what it sends and gives up after GATEWAY_FIRST_RESPONSE_TIMEOUT; "
            "other clients need a deadline of their own",
        )


def _check_config(model: RepositoryModel, config: ModelFile) -> Iterator[Finding]:
    if config.max_batch_size:
        yield Finding(
            "error",
            model.name,
            "max_batch_size",
            f"config.pbtxt: found {config.max_batch_size}: Triton then puts a dimension in front "
            'of every tensor, and model.py answers "Expected a scalar tensor"',
            "write max_batch_size: 0, or leave it out; the engine batches by itself",
        )
    if config.instance_kinds - {"KIND_CPU", "KIND_MODEL"}:
        yield Finding(
            "error" if "KIND_GPU" in config.instance_kinds else "warning",
            model.name,
            "instance_group",
            f"found {', '.join(sorted(config.instance_kinds))}: Triton starts an instance for each "
            "GPU that it sees, and each of them an engine on the same GPUs",
            f"write {_ON_CPU}: the LLM API takes the GPUs itself",
        )
    elif not config.instance_kinds:
        yield Finding(
            "warning",
            model.name,
            "instance_group",
            "not there: Triton chooses, which may be an instance for each GPU that it sees",
            f"write {_ON_CPU}: the LLM API takes the GPUs itself",
        )


def _check_shadows(model: RepositoryModel) -> Iterator[Finding]:
    """Yield a finding for each file that Python would import instead of TensorRT-LLM."""
    version = model.versions[-1]
    paths = [version / _PACKAGE, version / f"{_PACKAGE}.py"]
    if model.name == _PACKAGE:
        paths.append(model.path / "__init__.py")
    for path in paths:
        if path.exists():
            yield Finding(
                "error",
                model.name,
                str(path.relative_to(model.path.parent)),
                f"Python imports it as {_PACKAGE}, in place of TensorRT-LLM: the model, or the "
                "engine's workers, do not start",
                "remove or rename it",
            )
