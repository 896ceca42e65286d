"""JSON format of a `BaseModel`.

Gateways store the base model and the adapters that were converted for this model in Redis. On each
engine's machine, this project's agent process reads the base model, to write the adapters' PEFT
files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from adapters.adapter import DTYPES, MODULE_IDS
from adapters.base_model import BaseModel

_MAX_BYTES = 256 * 1024
_MAX_NUMBER = 2**31 - 1
_TEXTS = ("architecture", "dtype")
_LISTS = ("names", "lora_target_modules")


def dump(base: BaseModel) -> bytes:
    return json.dumps(asdict(base), sort_keys=True).encode()


def parse(raw: bytes) -> BaseModel:
    """Parse a base model. Raise ValueError for an invalid value, or a missing or unknown field."""
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"{len(raw)} bytes are no base model")
    found = json.loads(raw)
    names = {field.name for field in fields(BaseModel)}
    if not isinstance(found, dict) or found.keys() != names:
        raise ValueError(f"not an object of {', '.join(sorted(names))}")
    for name, value in found.items():
        if name in _LISTS:
            ok = isinstance(value, list) and all(isinstance(each, str) for each in value)
            found[name] = tuple(value) if ok else value
        elif name in _TEXTS:
            ok = isinstance(value, str)
        else:
            ok = type(value) is int and 0 <= value <= _MAX_NUMBER
        if not ok:
            raise ValueError(f"{name}: {str(value)[:80]!r}")
    base = BaseModel(**found)
    if (
        base.dtype not in DTYPES
        or not base.names
        or MODULE_IDS.keys().isdisjoint(base.lora_target_modules)
    ):
        raise ValueError("dtype, names or lora_target_modules")
    return base
