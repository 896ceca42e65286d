"""Validation of values in Redis, which are untrusted input.

Other programs may write to the same Redis: a newer release, an operator's script, or an attacker
who controls another client. Invalid values are not used. Invalid records are not overwritten or
deleted automatically. `lora_store.refusals` counts invalid values.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from adapters.record import Record
from adapters.record_json import as_json, from_json

_MAX_RECORD_BYTES = 16 * 1024 * 1024
_MAX_VERSION_BYTES = 4 * 1024**3
_CHUNK_BYTES = range(64 * 1024, 512 * 1024**2 + 1)  # allowed sizes, up to Redis' limit for values
_DESCRIPTION = re.compile(rb"([0-9]{1,10}) ([0-9]{1,9}) ([0-9]{1,11})")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record in Redis: the stored bytes and the parsed record.

    `record` is None if the bytes are invalid.
    """

    raw: bytes
    record: Record | None


@dataclass(frozen=True, slots=True)
class VersionDescription:
    """Size of an adapter version in Redis, and of the chunks into which it is divided.

    Attributes:
        size: number of bytes of all chunks together.
        chunk_bytes: size of each chunk except the last, in bytes.
        put_at: time at which the version was last stored, in seconds since 1970.
    """

    size: int
    chunk_bytes: int
    put_at: int

    @property
    def chunks(self) -> range:
        """Numbers of the chunks, from 0."""
        return range(-(-self.size // self.chunk_bytes))

    def length(self, number: int) -> int:
        """Return the size of one chunk in bytes."""
        return min(self.chunk_bytes, self.size - number * self.chunk_bytes)

    def dump(self) -> bytes:
        return b"%d %d %d" % (self.size, self.chunk_bytes, self.put_at)


def read_description(raw: bytes) -> VersionDescription:
    """Parse a `VersionDescription` from Redis. Raise ValueError if it is invalid."""
    found = _DESCRIPTION.fullmatch(raw)
    if found is None:
        raise ValueError("not SIZE CHUNK_SIZE TIME")
    description = VersionDescription(*map(int, found.groups()))
    if not 0 < description.size <= _MAX_VERSION_BYTES:
        raise ValueError(f"{description.size} bytes are no version")
    if description.chunk_bytes not in _CHUNK_BYTES:
        raise ValueError(f"chunks of {description.chunk_bytes} bytes")
    return description


def dump(record: Record) -> bytes:
    return json.dumps(as_json(record), sort_keys=True, separators=(",", ":")).encode()


def read_record(name: str, raw: bytes) -> Record:
    """Parse the JSON record of the adapter `name`. Raise ValueError if it is invalid."""
    if len(raw) > _MAX_RECORD_BYTES:
        raise ValueError(f"{len(raw)} bytes are no record")
    try:
        record = from_json(json.loads(raw))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if record.name != name:
        raise ValueError("the record of another name")
    return record
