"""Renders the GPT repository for an engine that is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.config_json import ConfigError
from adapters.engine_config import read_engine_config
from ops.deployment.repository import DescriptionError
from triton_repo.gpt_repository import render_gpt
from triton_repo.render import RenderError


def write_gpt(fields: Mapping[str, Any], destination: Path) -> None:
    """Write the four models into `destination`.

    `fields` are `engine_dir` and `tokenizer_dir`, from the working directory if they are relative,
    and what `parameters` says of other template parameters.

    Raises DescriptionError, and then nothing is written.
    """
    values = {**fields, **fields.get("parameters", {})}
    values.pop("parameters", None)
    values |= {
        name: str(Path(values[name]).absolute())
        for name in ("engine_dir", "tokenizer_dir")
        if name in values
    }
    try:
        if "engine_dir" in values:
            read_engine_config(Path(values["engine_dir"]))
        render_gpt(destination, values)
    except ConfigError as error:
        raise DescriptionError(f"engine_dir: {error}") from error
    except RenderError as error:
        raise DescriptionError(str(error)) from error
