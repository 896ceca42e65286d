"""Renderer of the GPT repository, a model repository without streaming, for an existing engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.config_json import ConfigError
from adapters.engine_config import read_engine_config
from ops.deployment.release import ReleaseError, read_sets
from ops.deployment.repository import DescriptionError, template_set
from triton_repo.gpt_repository import render_gpt
from triton_repo.releases import DEFAULT
from triton_repo.render import RenderError


def write_gpt(fields: Mapping[str, Any], destination: Path) -> None:
    """Write the four models of the GPT repository into `destination`.

    Args:
        fields: `release`, `engine_dir`, `tokenizer_dir`, and a mapping `parameters` of other
            template parameters. Relative paths start at the working directory.
        destination: folder of the new repository.

    Raises DescriptionError, before anything is written, for wrong fields.
    """
    values = {**fields, **fields.get("parameters", {})}
    values.pop("parameters", None)
    release = values.pop("release", None)
    values |= {
        name: str(Path(values[name]).absolute())
        for name in ("engine_dir", "tokenizer_dir")
        if name in values
    }
    try:
        templates = DEFAULT if release is None else read_sets(release, "release")[0]
        if "engine_dir" in values:
            engine = read_engine_config(Path(values["engine_dir"]))
            templates = template_set(release and templates, engine)
        render_gpt(destination, values, release=templates)
    except ConfigError as error:
        raise DescriptionError(f"engine_dir: {error}") from error
    except (RenderError, ReleaseError) as error:
        raise DescriptionError(str(error)) from error
