"""The record of a key made over the API: its hash, its tenant, and its expiry.

A record changes at most once, when its key is revoked, and this is final. Copies are therefore
joined by taking the revoked one. All copies agree once they have met, in any order, and no old copy
restores a key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.config.tenants import KeyHash, key_hash, new_key

MAX_NOTE_CHARS = 256
"""Maximum length of a note."""
NOTE_PATTERN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""No control characters: notes are shown in terminals."""
_ID_DIGITS = 24
_ID = re.compile(rf"key_[0-9a-f]{{{_ID_DIGITS}}}")
_AFTER_PREFIX = len("sha256:")

Time = Annotated[int, Field(ge=0, lt=2**40)]
"""Seconds since 1970."""


class KeyRecord(BaseModel):
    """A key's record. Frozen; unknown fields are refused, too."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hash: KeyHash
    tenant: Annotated[str, Field(min_length=1, max_length=64)]
    note: Annotated[str, Field(max_length=MAX_NOTE_CHARS, pattern=NOTE_PATTERN)]
    created: Time
    created_by: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{8}$")]
    """The admin's id, as `Access.admin` returns it."""
    expires: Time | None
    """Second from which the key is invalid; None for no limit."""
    revoked: Time | None = None

    @property
    def id(self) -> str:
        """Public id: a part of the hash, so that a key that was found can be identified."""
        return key_id(self.hash)


def make_record(
    tenant: str, note: str, expires_in: int | None, created_by: str
) -> tuple[KeyRecord, str]:
    """Return the record of a new key, and the key itself, which is not stored.

    `expires_in` is in seconds.
    """
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
    """Return True if a key could have this id."""
    return _ID.fullmatch(text) is not None


Records = Mapping[str, KeyRecord]
"""Records by id, with revoked ones."""

Uses = Mapping[str, int]
"""Last use of each key in seconds since 1970, by id."""

_LIST = TypeAdapter(list[KeyRecord])
_USES = TypeAdapter(dict[str, Time])


def key_id(key_hash: str) -> str:
    """Return ``key_`` and the first 24 digits of the hash, 96 bits."""
    return f"key_{key_hash[_AFTER_PREFIX : _AFTER_PREFIX + _ID_DIGITS]}"


def join_records(known: Records, others: Iterable[KeyRecord]) -> dict[str, KeyRecord]:
    """Return `known` with the new and the revoked records of `others`.

    If both have a key, the copy in `known` wins unless the other is revoked: a copy for another
    tenant, or with a later expiry, was not made by a gateway.
    """
    result = dict(known)
    for record in others:
        mine = result.get(record.id)
        if mine is None or (mine.revoked is None and record.revoked is not None):
            result[record.id] = record
    return result


def dump(record: KeyRecord) -> bytes:
    return record.model_dump_json().encode()


def parse_record(key_id: str, raw: bytes) -> KeyRecord:
    """Parse the record of this key. Raise ValueError, which quotes no content."""
    try:
        record = KeyRecord.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(_problem(error)) from None
    if record.id != key_id:
        raise ValueError("the record of another key")
    return record


def dump_all(records: Records) -> bytes:
    return _LIST.dump_json(list(records.values()), indent=1)


def parse_records(raw: bytes) -> dict[str, KeyRecord]:
    """Parse what `dump_all` returned. Raise ValueError as `parse_record` does."""
    try:
        return {record.id: record for record in _LIST.validate_json(raw)}
    except ValidationError as error:
        raise ValueError(_problem(error)) from None


def parse_uses(raw: bytes) -> Uses:
    """Parse stored uses. Raise ValueError if they are invalid."""
    return _USES.validate_json(raw, strict=True)


def merge_uses(*several: Uses) -> dict[str, int]:
    """Return the latest use of each key."""
    result: dict[str, int] = {}
    for uses in several:
        for key, when in uses.items():
            result[key] = max(when, result.get(key, 0))
    return result


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
