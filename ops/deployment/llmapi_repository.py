"""Renderer of the llmapi repository for a Hugging Face folder or a model on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ops.deployment.repository import DescriptionError
from triton_repo.llmapi_repository import render_llmapi
from triton_repo.parameters import CORE
from triton_repo.render import RenderError

_TOKENIZER_DIR = "tokenizer_dir"


def write_llmapi(fields: Mapping[str, Any], destination: Path, name: str = CORE) -> None:
    """Write the llmapi repository, which has one model, into `destination`.

    Args:
        fields: `model`, `decoupled`, and a mapping `parameters` of other template parameters. If
            the model's folder has no tokenizer, also `tokenizer_dir`. The paths of existing folders
            become absolute.
        destination: folder of the new repository.
        name: the model's name in Triton.

    Raises DescriptionError, before anything is written, for wrong fields.
    """
    values = {**fields, **fields.get("parameters", {})}
    values.pop("parameters", None)
    if _TOKENIZER_DIR in values:
        values["tokenizer"] = values.pop(_TOKENIZER_DIR)
    for folder in ("model", "tokenizer"):
        if folder in values and Path(values[folder]).is_dir():
            values[folder] = str(Path(values[folder]).absolute())
    try:
        render_llmapi(destination, values, model=name)
    except RenderError as error:
        raise DescriptionError(str(error)) from error
