"""Renderer of the inflight_batcher_llm model repository from this package's templates.

See decision 050 in docs/decisions.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from triton_repo.parameters import BLS, CORE, MODELS, Parameter, Value, parameters_of
from triton_repo.releases import DEFAULT, RELEASES, module_of, template_of

TEMPLATES = Path(__file__).parent
BOOLEANS = TEMPLATES / "booleans.py"
"""Module that the Python models import. Each model's version folder gets a copy."""
# Matches the lines with the name of the model `tensorrt_llm`, in the model's own config.pbtxt and
# in the ensemble's steps.
_CORE_NAMED = re.compile(rf'(?m)^( *(?:model_)?name: "){CORE}(")$')
_LORA_TYPE = re.compile(r'(name: "lora_weights" data_type: )\w+')


class RenderError(ValueError):
    """The parameters do not fit the templates. The message has one line per problem."""


def render(
    destination: Path,
    parameters: Mapping[str, Value],
    models: Sequence[str] = MODELS,
    *,
    release: str = DEFAULT,
    core_name: str = CORE,
) -> None:
    """Write `models` into `destination`, each with its config.pbtxt and version folder.

    Nothing is written unless all parameters are valid. Existing files are replaced.

    Args:
        destination: the model repository; created with its parents.
        parameters: values by name, for the names in `triton_repo.parameters.PARAMETERS` that belong
            to `models` and `release`. Values may be strings, which are converted to the parameter's
            type.
        models: the models to render.
        release: one of `triton_repo.releases.RELEASES`.
        core_name: name of the model `tensorrt_llm` in Triton. Its folder has this name, and the
            models that call it use the name.

    Raises:
        RenderError: a release, a model or a parameter is unknown, a mandatory parameter is missing,
            or a value has the wrong type or is not allowed. The message lists all problems.
    """
    if release not in RELEASES:
        raise RenderError(f"release: found {release}; allowed: {', '.join(RELEASES)}")
    unknown = [model for model in models if model not in MODELS]
    if unknown:
        raise RenderError(f"models: found {', '.join(unknown)}; allowed: {', '.join(MODELS)}")
    if core_name != CORE and BLS in models:
        parameters = {"tensorrt_llm_model_name": core_name, **parameters}
    written = filled_values(parameters, models, release)
    for model in models:
        template = (TEMPLATES / model / "config.pbtxt").read_text(encoding="utf-8")
        folder = destination / (core_name if model == CORE else model)
        version = folder / "1"
        version.mkdir(parents=True, exist_ok=True)
        config = Template(template_of(release, template)).substitute(written)
        if "lora_weights_data_type" in written:
            config = _LORA_TYPE.sub(rf"\g<1>{written['lora_weights_data_type']}", config)
        config = _CORE_NAMED.sub(rf"\g<1>{core_name}\g<2>", config)
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
        modules = list((TEMPLATES / model / "1").glob("*.py"))
        for module in [*modules, BOOLEANS] if modules else []:
            write_module(module, version / module.name, release)


def write_module(source: Path, destination: Path, release: str) -> None:
    """Write a copy of a Python module for one template set."""
    text = source.read_text(encoding="utf-8")
    destination.write_text(module_of(release, text), encoding="utf-8")


def core_inputs(release: str) -> frozenset[str]:
    """Return the names of the inputs in the `tensorrt_llm` template of one template set."""
    template = (TEMPLATES / CORE / "config.pbtxt").read_text(encoding="utf-8")
    declared, _, _ = template_of(release, template).partition("\noutput [")
    return frozenset(re.findall(r'\{ name: "(\w+)"', declared))


def filled_values(
    parameters: Mapping[str, Value], models: Sequence[str] = MODELS, release: str = DEFAULT
) -> dict[str, str]:
    """Return each parameter of `models` as text for config.pbtxt.

    Raises RenderError if a parameter is unknown, a mandatory one is missing, or a value is not
    allowed.
    """
    table: dict[str, Parameter] = {}
    for entry in parameters_of(release):
        # A parameter may be mandatory in one model and optional in another. Prefer the mandatory
        # entry.
        if set(entry.models) & set(models) and (entry.mandatory or entry.name not in table):
            table[entry.name] = entry
    return values(table, parameters, models)


def values(
    table: Mapping[str, Parameter], parameters: Mapping[str, Value], models: Sequence[str]
) -> dict[str, str]:
    """Return each parameter in `table` as text for config.pbtxt.

    Raises RenderError if a parameter is unknown, a mandatory one is missing, or a value is not
    allowed.
    """
    problems = [
        f"{name}: unknown parameter; allowed for {', '.join(models)}: {', '.join(sorted(table))}"
        for name in parameters
        if name not in table
    ]
    written = {}
    for entry in table.values():
        value = _write_value(entry, parameters)
        if value is None:
            found = repr(parameters[entry.name]) if entry.name in parameters else "nothing"
            problems.append(f"{entry.name}: found {found}; allowed: {entry.kind.allowed}")
        else:
            written[entry.name] = value
    if problems:
        raise RenderError("\n".join(problems))
    return written


def _write_value(entry: Parameter, parameters: Mapping[str, Value]) -> str | None:
    if entry.name in parameters:
        return entry.kind.write(parameters[entry.name])
    return None if entry.mandatory else entry.default
