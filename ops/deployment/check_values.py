"""Rules that check individual values: parameters that a model cannot parse, and instance counts."""

from __future__ import annotations

from collections.abc import Iterator

from ops.deployment.check_findings import Finding
from ops.deployment.check_repository import Repository, RepositoryModel, template_name
from triton_repo.booleans import parse_boolean
from triton_repo.parameters import (
    BLS,
    CORE,
    PARAMETERS,
    POSTPROCESSING,
    PREPROCESSING,
    ParameterKind,
    is_boolean,
)

# Parameters that the rules below skip, because `check_structure` checks their values.
_JUDGED_ELSEWHERE = ("batching_strategy",)


def value_findings(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        if model.is_llmapi:
            continue
        yield from _check_values(repository, model)
    for core in repository.cores:
        yield from _check_instances(core)


def _check_values(repository: Repository, model: RepositoryModel) -> Iterator[Finding]:
    """Yield an error for each parameter value that the model cannot parse, or parses wrongly.

    With a value that is parsed wrongly, the model loads, but runs with another value.
    """
    template = _find_template(repository, model)
    if model.file is None or template is None:
        return
    kinds = {entry.name: entry.kind for entry in PARAMETERS if template in entry.models}
    for key in model.file.parameters:
        name, value = template_name(key), model.parameter(key)
        kind = kinds.get(name)
        if not value or kind is None or name in _JUDGED_ELSEWHERE:
            continue
        if (problem := _find_problem(kind, value, template)) is not None:
            yield Finding("error", model.name, name, *problem)


def _find_problem(kind: ParameterKind, value: str, template: str) -> tuple[str, str] | None:
    """Return a value's problem and how to fix it, or None for a valid value."""
    found = f"found {value!r}; allowed: {kind.allowed}"
    if not is_boolean(kind):
        if kind.write(value) is not None:
            return None
        consequence = "the model does not load, or runs with another value"
        return f"{found}: {consequence}", f"write {kind.allowed}"
    try:
        parse_boolean(value, of_text_model=template != CORE)
    except ValueError:
        reads = "false" if template in (CORE, BLS) else "its default, true,"
        return (
            f"{found}: upstream's model reads it as {reads} without a word, and this project's "
            "does not load",
            "write true or false, without blanks around it",
        )
    return None


def _find_template(repository: Repository, model: RepositoryModel) -> str | None:
    if model.runs_engine:
        return CORE
    if model in repository.bls_models:
        return BLS
    return model.name if model.name in (PREPROCESSING, POSTPROCESSING) else None


def _check_instances(core: RepositoryModel) -> Iterator[Finding]:
    """Yield an error if several instances would load engines onto the same GPUs."""
    assert core.file is not None
    count, given = core.file.instance_count, core.parameter("gpu_device_ids")
    lists = len(given.split(";")) if given else 0
    if count <= 1 or (core.file.backend == "tensorrtllm" and lists == count):
        return
    problem = f"found {count}: as many engines are loaded"
    if core.file.backend != "tensorrtllm":
        problem += (
            ", and a stop request reaches one of them, which need not be the one that runs the "
            "request"
        )
    elif not given:
        problem += " onto the same GPUs, as gpu_device_ids is not set"
    else:
        problem += f", but gpu_device_ids has {lists} lists of GPUs ({given})"
    yield Finding(
        "error",
        core.name,
        "instance_group",
        problem,
        "write count: 1, as one engine runs requests side by side (max_batch_size); with "
        "triton_backend tensorrtllm more are allowed, with as many lists in gpu_device_ids, "
        "such as 0;1",
    )
