"""`gateway serve`: the gateway alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.config.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Runs the gateway against the Triton that the GATEWAY_* variables name."


def run(parsed: argparse.Namespace) -> int:
    """Blocks until SIGTERM; 2 after naming wrong settings."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from gateway.config.file import ConfigurationError
    from gateway.config.settings import Settings
    from gateway.server import serve

    try:
        settings = Settings()  # type: ignore[call-arg]  # pydantic reads the environment
    except SettingsError as error:  # names the field; what is no JSON there may be secret
        print(f"gateway serve: {error}", file=sys.stderr)
        return 2
    except ValidationError as error:
        return _refuse(_problem(problem) for problem in error.errors())
    if missing := list(_missing(settings)):
        return _refuse(missing)
    try:
        return serve(settings)
    except ConfigurationError as error:
        print(f"gateway serve: {error}", file=sys.stderr)
        return 2


def _problem(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
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


def _refuse(problems: Iterable[str]) -> int:
    print("gateway serve: " + "\n".join(problems), file=sys.stderr)
    return 2
