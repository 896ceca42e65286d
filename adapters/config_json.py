"""Reader of the config.json in TensorRT-LLM and Hugging Face folders.

If a field has a wrong value, the error names the field, the value found and the values allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.file_kinds import HEAD_BYTES, describe_gguf, kind_of, kind_of_file

FILE = "config.json"
_SHOWN = 80


class ConfigError(ValueError):
    """Error for an invalid config.json.

    `field` names the invalid field. It is "" if no single field is the cause.

    The message begins with the path and the field. The rest is the argument `says`, or "found ...;
    allowed: ..." if `says` is "".
    """

    def __init__(
        self, path: Path, found: str, allowed: str, field: str = "", *, says: str = ""
    ) -> None:
        where = f"{path}: {field}" if field else str(path)
        super().__init__(f"{where}: {says or f'found {found}; allowed: {allowed}'}")
        self.says = says
        self.path = path
        self.field = field
        self.found = found
        self.allowed = allowed


class ConfigMissing(ConfigError):
    """A file is missing or cannot be read."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason, "a readable file", says=_why_missing(path, reason))


@dataclass(frozen=True, slots=True)
class Section:
    """A JSON object in a config.json, with methods that check the types of the object's fields.

    A field with the value null counts as absent. If a method is called with several field names, it
    returns the value of the first field that is present. Methods raise ConfigError if a field has a
    value of another type.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @property
    def is_engine(self) -> bool:
        """True if the file describes a TensorRT-LLM engine.

        False for the file of a Hugging Face model or of a TensorRT-LLM checkpoint.
        """
        return not self.values.keys().isdisjoint(
            ("pretrained_config", "build_config", "builder_config")
        )

    def section(self, name: str) -> Section:
        value = self._get_typed(name, dict, "an object")
        return Section(self.path, value or {}, f"{self.prefix}{name}.")

    def count(self, *names: str, least: int = 0) -> int | None:
        allowed = "a positive integer" if least else "an integer of at least 0"
        for name in names:
            value: int | None = self._get_typed(name, int, allowed)
            if value is None:
                continue
            if isinstance(value, bool) or value < least:
                raise self.build_error(name, allowed)
            return value
        return None

    def require_count(self, *names: str) -> int:
        """Return the value of a field that must be a positive integer.

        Raise ConfigError if the field is absent or has another value.
        """
        value = self.count(*names, least=1)
        if value is None:
            raise self.build_error(names[0], "a positive integer")
        return value

    def text(self, *names: str) -> str | None:
        found = (self._get_typed(name, str, "a string") for name in names)
        return next((value for value in found if value is not None), None)

    def names(self, name: str) -> tuple[str, ...]:
        value = self._get_typed(name, list, "a list of names") or []
        if not all(isinstance(item, str) for item in value):
            raise self.build_error(name, "a list of names")
        return tuple(value)

    def flag(self, name: str) -> bool | None:
        """Return a boolean field; None if the field is absent.

        The texts `enable` and `disable`, which trtllm-build writes, are accepted as booleans.
        """
        value = self.values.get(name)
        if value in ("enable", "disable"):
            return bool(value == "enable")
        found: bool | None = self._get_typed(name, bool, "true or false")
        return found

    def build_error(self, name: str, allowed: str) -> ConfigError:
        found = json.dumps(self.values.get(name))[:_SHOWN]
        return ConfigError(self.path, found, allowed, self.prefix + name)

    def _get_typed(self, name: str, kind: type, allowed: str) -> Any:
        value = self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.build_error(name, allowed)
        return value


def _why_missing(path: Path, reason: str) -> str:
    folder = path.parent
    if not folder.exists():
        return f"there is no folder {folder}; give the path of one that exists"
    if not folder.is_dir():
        kind = kind_of_file(folder)
        return f"{folder} is {kind.name}" if kind else f"{folder} is a file, and not a folder"
    if path.exists():
        return reason
    if found := describe_gguf(folder, "is not there, and "):
        return found
    return f"is not there, so {folder} is not the folder of a model or an engine; name one that is"


def read_config(folder: Path) -> Section:
    """Read ``folder/config.json``.

    Raise ConfigMissing if the file cannot be read. Raise ConfigError if it is not a JSON object.
    """
    path = folder / FILE
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigMissing(path, str(error.strerror)) from error
    if (kind := kind_of(raw[:HEAD_BYTES])) is not None:
        raise ConfigError(path, kind.name, "a JSON object", says=kind.words)
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, f"no JSON ({error})", "a JSON object") from error
    if not isinstance(data, dict):
        raise ConfigError(path, type(data).__name__, "a JSON object")
    return Section(path, data)
