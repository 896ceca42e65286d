"""Model repository of `gateway up --repository llmapi`: a single model, run by the CPU executor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from adapters.config_json import read_config
from ops.local_stack.errors import StackError
from ops.local_stack.repository import (
    MAX_BATCH_SIZE,
    MAX_KV_CACHE_TOKENS,
    REPOSITORY,
    clear,
    require_files,
)

MAX_SEQ_LEN = "max_seq_len"


def max_seq_len(model: Path, parameters: Mapping[str, str]) -> int:
    """Return the limit of prompt plus output in tokens.

    The gateway needs this value as a setting, because the llmapi repository's model does not report
    it. Raises StackError for a folder that the CPU executor cannot serve.
    """
    from triton_repo.cpu_executor.engine import load_config  # noqa: PLC0415

    require_files(model)
    if (given := parameters.get(MAX_SEQ_LEN, "")).isdecimal():
        return int(given)
    try:
        return load_config(model).max_seq_len
    except ValueError as error:
        raise StackError(f"--model: {error}") from error


def in_flight(parameters: Mapping[str, str]) -> int:
    """Return the number of requests that a gateway should send at once: 1.25 * batch size."""
    given = parameters.get("max_batch_size", "")
    return math.ceil(1.25 * (int(given) if given.isdecimal() else MAX_BATCH_SIZE))


def prepare_llmapi(model: Path, state_dir: Path, parameters: Mapping[str, str]) -> None:
    """Write the llmapi repository for `model` into `repository/` in `state_dir`.

    An earlier folder `repository/` is removed first.

    Arguments are those of `ops.local_stack.repository.prepare`.

    Raises StackError if the repository cannot be rendered.
    """
    from triton_repo.cpu_executor import engine  # noqa: PLC0415
    from triton_repo.llmapi_repository import render_llmapi  # noqa: PLC0415
    from triton_repo.render import RenderError  # noqa: PLC0415

    repository = state_dir / REPOSITORY
    clear(repository)
    values = {"model": str(model.absolute()), "max_batch_size": str(MAX_BATCH_SIZE)}
    try:
        # Set limits and LoRA modules only for a Hugging Face folder. For an engine folder, they are
        # in the engine's config.json.
        if not read_config(model).is_engine:
            values["max_tokens_in_kv_cache"] = MAX_KV_CACHE_TOKENS
            values[MAX_SEQ_LEN] = str(max_seq_len(model, parameters))
            if modules := engine.lora_modules(model):
                values["lora_target_modules"] = ",".join(modules)
        render_llmapi(repository, values | dict(parameters))
    except (RenderError, ValueError) as error:
        raise StackError(f"the model repository of {model} cannot be made: {error}") from error
