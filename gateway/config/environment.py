"""Loading of the settings from GATEWAY_* environment variables, with checks for the operator.

The checks find unknown variables, invalid values, and files or folders that do not exist.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from adapters.model_files import tokenizer_problems
from gateway.config.file import ConfigurationError
from gateway.config.setting_types import is_service_link
from gateway.config.settings import Settings, StorageSettings

# GATEWAY_* variables that are known but are not settings of the gateway. They are used by `gateway
# triton launch`, by commands that send requests to a gateway, and by docker-compose.yml.
_OTHER_VARIABLES = {"GATEWAY_LAUNCH", "GATEWAY_URL", "GATEWAY_IMAGE"}
# Variables that Kubernetes sets for a Service named `gateway` or `gateway-...`.
_SERVICE_LINK = re.compile(
    r"GATEWAY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


# Advice for the operator, by setting. It ends the error message that a required setting is not set.
_REQUIRED = {
    "tokenizer_dir": "set it to the Hugging Face folder of the model that Triton serves, which has "
    "tokenizer.json, such as GATEWAY_TOKENIZER_DIR=/models/llama",
}


def settings_from_environment() -> Settings:
    """Return the settings from the GATEWAY_* variables.

    Raise ConfigurationError with one line for each problem.
    """
    return _load(Settings, _find_missing)


def storage_settings_from_environment() -> StorageSettings:
    """Return the settings of stored data. Raise ConfigurationError like the function above."""
    return _load(StorageSettings, lambda _: ())


S = TypeVar("S", Settings, StorageSettings)


def _load(settings_class: type[S], find_missing: Callable[[S], Iterable[str]]) -> S:
    problems = find_unknown_variables()
    try:
        settings = settings_class()  # type: ignore[call-arg]  # pydantic reads the environment
    except SettingsError as error:
        problems.append(_describe_json_error(error))
    except ValidationError as error:
        problems += map(_describe_problem, error.errors())
    else:
        problems += find_missing(settings)
        if not problems:
            return settings
    # Raise outside `except`, so that the traceback does not include pydantic's error, which may
    # quote secrets.
    raise ConfigurationError("\n".join(problems))


def find_unknown_variables() -> list[str]:
    """Return an error message for each GATEWAY_* variable whose name is unknown.

    The message suggests the setting with the most similar name. Variables that Kubernetes sets for
    Services are ignored.
    """
    known = [f"GATEWAY_{name.upper()}" for name in Settings.model_fields]
    problems = []
    for name, value in sorted(os.environ.items()):
        upper = name.upper()  # pydantic accepts upper and lower case
        if not upper.startswith("GATEWAY_") or upper in known or upper in _OTHER_VARIABLES:
            continue
        if _SERVICE_LINK.fullmatch(upper) or (upper.endswith("_PORT") and is_service_link(value)):
            continue
        nearest = difflib.get_close_matches(upper, known, n=1, cutoff=0)[0]
        problems.append(f"{name}: there is no such setting; the nearest is {nearest}")
    return problems


def _describe_json_error(error: SettingsError) -> str:
    """Return a message for a variable that is not valid JSON.

    The message does not quote the value, which may be a secret.
    """
    field = re.search(r'field "(\w+)"', str(error))
    if field is None:
        return str(error)
    return f"GATEWAY_{field[1].upper()}: is not JSON; docs/settings.md shows what is expected"


def _describe_problem(problem: Any) -> str:
    message: str = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        message = f"is not set; {_REQUIRED[str(problem['loc'][0])]}"
    # An error without a location concerns several settings, and its message names these settings.
    name = "_".join(str(part) for part in problem["loc"]).upper()
    return f"GATEWAY_{name}: {message}" if name else message


def _find_missing(settings: Settings) -> Iterator[str]:
    """Yield an error message for each file or folder that is missing or not writable.

    `Settings` does not check files and folders itself, so that settings for another machine can be
    validated, too.
    """
    if not settings.tokenizer_dir.is_dir():
        yield f"GATEWAY_TOKENIZER_DIR: {settings.tokenizer_dir} is not a folder"
    for problem in tokenizer_problems(settings.tokenizer_dir):
        yield f"GATEWAY_TOKENIZER_DIR: {problem}"
    for name in ("triton_tls_ca", "triton_tls_cert", "triton_tls_key"):
        path = getattr(settings, name)
        if path is not None and not path.is_file():
            yield f"GATEWAY_{name.upper()}: {path} is not a file"
    if settings.store_dir.is_file() or not _is_writable(settings.store_dir):
        yield f"GATEWAY_STORE_DIR: {settings.store_dir} is not a folder that can be written to"
    log = settings.usage_log
    if log is not None and (log.is_dir() or not log.parent.is_dir() or not _is_writable(log)):
        yield f"GATEWAY_USAGE_LOG: {log} is not a file that can be written to"


def _is_writable(path: Path) -> bool:
    """Return True if the path can be written to or, if it does not exist, can be created."""
    if path.exists():
        return os.access(path, os.W_OK)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    return above.is_dir() and os.access(above, os.W_OK)
