"""The settings of this process, read from the environment and checked against this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings


def settings_from_environment() -> Settings:
    """The GATEWAY_* variables. Raises ConfigurationError with a line for each that is wrong."""
    try:
        settings = Settings()  # type: ignore[call-arg]  # pydantic reads the environment
    except SettingsError as error:  # names the field; what is no JSON there may be secret
        raise ConfigurationError(str(error)) from None
    except ValidationError as error:
        raise ConfigurationError("\n".join(map(_problem, error.errors()))) from None
    if missing := list(_missing(settings)):
        raise ConfigurationError("\n".join(missing))
    return settings


def _problem(problem: Any) -> str:
    message: str = problem["msg"].removeprefix("Value error, ")
    # What is wrong with several settings together names them itself.
    name = "_".join(str(part) for part in problem["loc"]).upper()
    return f"GATEWAY_{name}: {message}" if name else message


def _missing(settings: Settings) -> Iterator[str]:
    """What this machine lacks: elsewhere settings may be those of another one."""
    if not settings.tokenizer_dir.is_dir():
        yield f"GATEWAY_TOKENIZER_DIR: {settings.tokenizer_dir} is not a folder"
    for name in ("triton_tls_ca", "triton_tls_cert", "triton_tls_key"):
        path = getattr(settings, name)
        if path is not None and not path.is_file():
            yield f"GATEWAY_{name.upper()}: {path} is not a file"
    if settings.store_dir.is_file() or not _can_be_written(settings.store_dir):
        yield f"GATEWAY_STORE_DIR: {settings.store_dir} is not a folder that can be written to"
    log = settings.usage_log
    if log is not None and (log.is_dir() or not log.parent.is_dir() or not _can_be_written(log)):
        yield f"GATEWAY_USAGE_LOG: {log} is not a file that can be written to"


def _can_be_written(path: Path) -> bool:
    """Or made, where it does not exist yet."""
    if path.exists():
        return os.access(path, os.W_OK)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    return above.is_dir() and os.access(above, os.W_OK)
