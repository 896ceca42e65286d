"""What is kept of a key that was made over the API: its hash, whose it is, and until when.

A record changes once at most, when its key is revoked, and there is no way back. So copies of it
are joined by taking the revoked one, and all places agree once they have seen each other, in
whatever order: no old copy brings a key back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.config.tenants import KeyHash, key_hash, new_key

MAX_NOTE = 256
"""Characters."""
NOTE = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""No control characters: notes are shown in terminals."""
_ID_DIGITS = 24
_ID = re.compile(rf"key_[0-9a-f]{{{_ID_DIGITS}}}")
_AFTER_PREFIX = len("sha256:")

Time = Annotated[int, Field(ge=0, lt=2**40)]
"""Seconds since 1970."""


class KeyRecord(BaseModel):
    """Frozen. What does not fit, a field that this release does not know among it, is no record."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hash: KeyHash
    tenant: Annotated[str, Field(min_length=1, max_length=64)]
    note: Annotated[str, Field(max_length=MAX_NOTE, pattern=NOTE)]
    created: Time
    created_by: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{8}$")]
    """The admin, as `Access.admin` names one."""
    expires: Time | None
    """From this second on it is nobody's."""
    revoked: Time | None = None

    @property
    def id(self) -> str:
        """Its public name: a part of the hash, so that whoever finds a key can tell which it is."""
        return key_id(self.hash)


def draw_key(
    tenant: str, note: str, expires_in: int | None, created_by: str
) -> tuple[KeyRecord, str]:
    """The record of a new key, and the key, which nobody keeps. `expires_in` is in seconds."""
    key, now = new_key(), int(time.time())
    record = KeyRecord(
        hash=key_hash(key),
        tenant=tenant,
        note=note,
        created=now,
        created_by=created_by,
        expires=None if expires_in is None else now + expires_in,
    )
    return record, key


def is_key_id(text: str) -> bool:
    """Whether a key could have this id."""
    return _ID.fullmatch(text) is not None


Records = Mapping[str, KeyRecord]
"""By id, revoked ones included."""

Uses = Mapping[str, int]
"""When a key was used last, in seconds since 1970, by id."""

_LIST = TypeAdapter(list[KeyRecord])
_USES = TypeAdapter(dict[str, Time])


def key_id(key_hash: str) -> str:
    """``key_`` and the first 24 digits of the hash, 96 bits."""
    return f"key_{key_hash[_AFTER_PREFIX : _AFTER_PREFIX + _ID_DIGITS]}"


def joined(known: Records, others: Iterable[KeyRecord]) -> dict[str, KeyRecord]:
    """`known` and what is new among `others`.

    Where both have a key, the copy in `known` stays unless the other is revoked: a copy that gives
    a key to somebody else, or for longer, was not made by a gateway.
    """
    result = dict(known)
    for record in others:
        mine = result.get(record.id)
        if mine is None or (mine.revoked is None and record.revoked is not None):
            result[record.id] = record
    return result


def dump(record: KeyRecord) -> bytes:
    return record.model_dump_json().encode()


def read(key_id: str, raw: bytes) -> KeyRecord:
    """The record of this key. Raises ValueError, which quotes nothing of what was found."""
    try:
        record = KeyRecord.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(_problem(error)) from None
    if record.id != key_id:
        raise ValueError("the record of another key")
    return record


def dump_all(records: Records) -> bytes:
    return _LIST.dump_json(list(records.values()), indent=1)


def read_all(raw: bytes) -> dict[str, KeyRecord]:
    """What `dump_all` wrote. Raises ValueError as `read` does, if any of it does not fit."""
    try:
        return {record.id: record for record in _LIST.validate_json(raw)}
    except ValidationError as error:
        raise ValueError(_problem(error)) from None


def read_uses(raw: bytes) -> Uses:
    """Raises ValueError."""
    return _USES.validate_json(raw, strict=True)


def latest(*several: Uses) -> dict[str, int]:
    """The latest use of each key."""
    result: dict[str, int] = {}
    for uses in several:
        for key, when in uses.items():
            result[key] = max(when, result.get(key, 0))
    return result


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
