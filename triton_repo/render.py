"""Fills the repository's templates into a folder that tritonserver can load."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from triton_repo.parameters import MODELS, PARAMETERS, Parameter, Value

TEMPLATES = Path(__file__).parent


class RenderError(ValueError):
    """The parameters do not fit the templates; one line per problem."""


def render(
    destination: Path, parameters: Mapping[str, Value], models: Sequence[str] = MODELS
) -> None:
    """Write `models` into `destination`, each with its config.pbtxt and version folder.

    Nothing is written unless all parameters are right. Files already there are replaced.

    Args:
        destination: the model repository to make; created with its parents.
        parameters: values by name, for the names in `triton_repo.parameters.PARAMETERS`
            that belong to `models`. Strings are read as the parameter's own type.
        models: the models to render.

    Raises:
        RenderError: a model or a parameter is unknown, a mandatory parameter is missing, or
            a value has the wrong type or is not allowed. All problems are named at once.
    """
    unknown = [model for model in models if model not in MODELS]
    if unknown:
        raise RenderError(f"models: found {', '.join(unknown)}; allowed: {', '.join(MODELS)}")
    written = filled_values(parameters, models)
    for model in models:
        template = Template((TEMPLATES / model / "config.pbtxt").read_text(encoding="utf-8"))
        version = destination / model / "1"
        version.mkdir(parents=True, exist_ok=True)
        config = template.substitute(written)
        (destination / model / "config.pbtxt").write_text(config, encoding="utf-8")
        for module in (TEMPLATES / model / "1").glob("*.py"):
            shutil.copyfile(module, version / module.name)


def filled_values(
    parameters: Mapping[str, Value], models: Sequence[str] = MODELS
) -> dict[str, str]:
    """The text for each `${name}` of `models`; raises RenderError as `render` does."""
    table: dict[str, Parameter] = {}
    for entry in PARAMETERS:
        # One model may need what another can do without.
        if set(entry.models) & set(models) and (entry.mandatory or entry.name not in table):
            table[entry.name] = entry
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
