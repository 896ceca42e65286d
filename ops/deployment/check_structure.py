"""Rules that check a model repository's files, and the connections between its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.triton.names import RENAMED
from gateway.triton.pbtxt import DeclaredTensor, EnsembleStep
from ops.deployment.check_findings import Finding
from ops.deployment.check_names import other_names
from ops.deployment.check_repository import CONFIG, Repository, RepositoryModel
from triton_repo.parameters import BLS, CORE, POSTPROCESSING, PREPROCESSING

# Mandatory parameters by model. Without them, the model does not load, or cannot serve requests.
_MANDATORY: Mapping[str, tuple[str, ...]] = {
    CORE: ("gpt_model_path", "gpt_model_type"),
    PREPROCESSING: ("tokenizer_dir",),
    POSTPROCESSING: ("tokenizer_dir",),
}
_BATCHING = ("inflight_fused_batching", "inflight_batching", "v1")
_LORA_INPUTS = ("lora_task_id", "lora_weights", "lora_config")
_TEMPLATE_KEYS = {"gpt_model_path": "engine_dir", "gpt_model_type": "batching_strategy"}


def structure_findings(repository: Repository) -> list[Finding]:
    """Return the findings on the models' files and parameters, and on the tensors between models.

    The files of the engine are not read.
    """
    found: list[Finding] = []
    for model in repository.models.values():
        found += _check_files(model)
        found += _check_unfilled(model)
    served = repository.cores or repository.llmapi_models
    if not served and all(model.file for model in repository.models.values()):
        found.append(_no_core())
    for ensemble in repository.ensembles:
        found += _check_steps(repository, ensemble)
    for model in repository.bls_models:
        found += _check_called_models(repository, model)
    for core in repository.cores:
        for model in [*repository.ensembles, *repository.bls_models]:
            found += _check_text_interface(model, core)
    return found


def _check_files(model: RepositoryModel) -> Iterator[Finding]:
    if model.file is None:
        yield Finding(
            "error",
            model.name,
            CONFIG,
            f"{model.problem}: Triton does not load the model",
            "correct the file, or render the repository anew with gateway repo render",
        )
        return
    if model.file.name not in ("", model.name):
        yield Finding(
            "error",
            model.name,
            "name",
            f"found {model.file.name!r} in a folder called {model.name}: Triton does not load it",
            f'set name: "{model.name}", or rename the folder',
        )
    if not model.versions:
        yield Finding(
            "error",
            model.name,
            "version folder",
            "there is no folder 1: Triton finds no version of the model and does not load it",
            f"create {model.path / '1'}"
            + (" with the model.py of that release" if model.file.backend == "python" else ""),
        )
    elif model.file.backend == "python" and not (model.versions[-1] / "model.py").is_file():
        yield Finding(
            "error",
            model.name,
            f"{model.versions[-1].name}/model.py",
            "the file is missing: Triton's Python backend does not load the model",
            "copy it from the repository that config.pbtxt came from, of the same release",
        )


def _check_unfilled(model: RepositoryModel) -> Iterator[Finding]:
    if model.file is None:
        return
    for name in model.file.holes:
        yield Finding(
            "error",
            model.name,
            name,
            f"${{{name}}} is unfilled where a number, true or false or a type belongs: "
            f"Triton cannot parse {CONFIG}",
            f'gateway repo fill -i {model.path / CONFIG} "{name}:VALUE"',
        )
    if model.file.backend.startswith("${"):
        yield Finding(
            "error",
            model.name,
            "triton_backend",
            f"{model.file.backend} is unfilled: Triton has no backend of that name",
            f'gateway repo fill -i {model.path / CONFIG} "triton_backend:tensorrtllm", or python',
        )
    mandatory = _MANDATORY.get(CORE if model.runs_engine else model.name, ())
    if model.is_gpt:
        mandatory = ("engine_dir",)
    if model.is_llmapi:
        mandatory = ()
    for key in mandatory:
        if not model.parameter(key):
            name = _TEMPLATE_KEYS.get(key, key)
            yield Finding(
                "error",
                model.name,
                name,
                f"the parameter {key} is not set: the model does not load",
                f'gateway repo fill -i {model.path / CONFIG} "{name}:VALUE", '
                "or write the value into the file",
            )
    batching = model.parameter("gpt_model_type")
    if batching and batching.lower() not in _BATCHING:
        yield Finding(
            "error",
            model.name,
            "batching_strategy",
            f'found gpt_model_type {batching}: the model stops with "Invalid gpt_model_type"',
            "set inflight_fused_batching, or V1",
        )
    unset = [name for name in model.unset_parameters if name not in mandatory]
    if unset:
        yield Finding(
            "note",
            model.name,
            "parameters",
            f"left as ${{...}}, which means not set: {', '.join(unset)}",
            "none is needed where the server's defaults are meant",
        )


def _no_core() -> Finding:
    return Finding(
        "error",
        "",
        CORE,
        "no model takes input_ids and request_output_len: there is nothing that runs an engine",
        "add the model tensorrt_llm: gateway repo render",
    )


def _check_steps(repository: Repository, ensemble: RepositoryModel) -> Iterator[Finding]:
    assert ensemble.file is not None
    types = dict(ensemble.file.inputs)
    for step in ensemble.file.steps:
        model = repository.models.get(step.model)
        if model is None:
            yield _missing(ensemble, step.model, "a step of it: Triton does not load the ensemble")
        elif model.file is not None:
            yield from _check_wires(ensemble, step, model.file.inputs, types)
            types |= {
                target: model.file.outputs[name]
                for name, target in step.outputs.items()
                if name in model.file.outputs
            }
    for name, declared in ensemble.file.outputs.items():
        if name in types and _differ(declared, types[name]):
            yield Finding(
                "error",
                ensemble.name,
                name,
                f"{declared.data_type} here, {types[name].data_type} in the model that makes it: "
                "Triton does not load the ensemble",
                "declare one type in both files",
            )


def _check_wires(
    ensemble: RepositoryModel,
    step: EnsembleStep,
    inputs: Mapping[str, DeclaredTensor],
    types: Mapping[str, DeclaredTensor],
) -> Iterator[Finding]:
    for name, source in step.inputs.items():
        if name not in inputs:
            yield Finding(
                "error",
                ensemble.name,
                name,
                f"the step {step.model} is given {name}, which that model does not have: the two "
                "come from different releases, and Triton does not load the ensemble",
                f"take both files from one release{_other_name(name, inputs)}",
            )
        elif source in types and _differ(types[source], inputs[name]):
            yield Finding(
                "error",
                ensemble.name,
                source,
                f"{types[source].data_type} here, {inputs[name].data_type} as {name} of "
                f"{step.model}: Triton does not load the ensemble",
                "declare one type in both files",
            )


def _other_name(name: str, inputs: Mapping[str, DeclaredTensor]) -> str:
    other = next((other for other in other_names(name) if other in inputs), None)
    return "" if other is None else f"; the model's name for it is {other}"


def _check_called_models(repository: Repository, bls: RepositoryModel) -> Iterator[Finding]:
    called = (PREPROCESSING, bls.parameter("tensorrt_llm_model_name") or CORE, POSTPROCESSING)
    draft = bls.parameter("tensorrt_llm_draft_model_name")
    for name in (*called, draft):
        if name and name not in repository.models:
            yield _missing(bls, name, "called by it: its requests fail")


def _missing(user: RepositoryModel, name: str, how: str) -> Finding:
    return Finding(
        "error",
        user.name,
        name,
        f"the model {name} is not in the repository, and is {how}",
        f"add the folder {name}, or remove {user.name} from the repository",
    )


def _check_text_interface(model: RepositoryModel, core: RepositoryModel) -> Iterator[Finding]:
    assert model.file is not None
    assert core.file is not None
    steps = {step.model: step for step in model.file.steps}
    if model.file.steps and core.name not in steps:
        return
    own, inner = model.file.inputs, core.file.inputs
    lost = [name for name in _LORA_INPUTS if name in inner and name not in own]
    if lost:
        yield Finding(
            "warning",
            model.name,
            "lora_task_id",
            f"{core.name} takes adapters, but {model.name} has no {', '.join(lost)} (releases "
            "before v0.15): adapters cannot be used through it",
            f"take {model.name} from v0.15 or later, or send adapters to {core.name} only",
        )
    if model.file.steps:
        # Stop here for an ensemble: `_check_steps` checks the types and names of its tensors.
        return
    if model.name == BLS and "lora_weights" in own and "lora_weights" in inner:
        first, second = own["lora_weights"], inner["lora_weights"]
        if _differ(first, second):
            yield Finding(
                "error",
                model.name,
                "lora_weights",
                f"{first.data_type} here, {second.data_type} in {core.name}: "
                "requests with LoRA weights fail",
                f"declare {second.data_type}",
            )
    for names in RENAMED:
        here = next((name for name in names if name in own), None)
        inner_name = next((name for name in names if name in inner), None)
        if here and inner_name and here != inner_name:
            yield Finding(
                "error",
                model.name,
                here,
                f"{core.name} calls this tensor {inner_name}: the two come from different "
                f"releases, and requests that set {here} fail",
                "take both models from one release",
            )


def _differ(first: DeclaredTensor, second: DeclaredTensor) -> bool:
    types = {first.data_type, second.data_type}
    return len(types) == 2 and "TYPE_INVALID" not in types
