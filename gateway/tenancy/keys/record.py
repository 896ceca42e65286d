"""Record of an API key that was created over the API: its hash, its tenant, and its expiry.

A record changes at most once: when its key is revoked. A revoked key never becomes valid again, so
of two copies of a record the revoked one is right.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gateway.config.tenants import KeyHash, key_hash, new_key

MAX_NOTE_CHARS = 256
"""Maximum length of an admin's note on a key."""
NOTE_PATTERN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Pattern of valid notes. Control characters are refused because notes are shown in terminals."""
_ID_DIGITS = 24
_ID = re.compile(rf"key_[0-9a-f]{{{_ID_DIGITS}}}")
_AFTER_PREFIX = len("sha256:")

Time = Annotated[int, Field(ge=0, lt=2**40)]
"""Seconds since 1970."""


class KeyRecord(BaseModel):
    """Record of an issued key. Immutable; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    hash: KeyHash
    tenant: Annotated[str, Field(min_length=1, max_length=64)]
    note: Annotated[str, Field(max_length=MAX_NOTE_CHARS, pattern=NOTE_PATTERN)]
    created: Time
    created_by: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{8}$")]
    """The admin's id, as `Access.admin` returns it."""
    expires: Time | None
    """Time from which the key is invalid; None if the key never expires."""
    revoked: Time | None = None

    @property
    def id(self) -> str:
        """Public id of the key, derived from the key's hash.

        An admin who finds a leaked key can therefore compute its id, and revoke the key.
        """
        return key_id(self.hash)


def make_record(
    tenant: str, note: str, expires_in: int | None, created_by: str
) -> tuple[KeyRecord, str]:
    """Create a key. Return its record, and the key itself, which is not stored.

    Args:
        tenant: name of the tenant to whom the key belongs.
        note: the admin's note.
        expires_in: seconds until the key expires; None if it never expires.
        created_by: the admin's id.
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
    """Return True if `text` has the form of a key's id."""
    return _ID.fullmatch(text) is not None


Records = Mapping[str, KeyRecord]
"""Records of keys by id, including revoked keys."""

Uses = Mapping[str, int]
"""Time of the last use of each key, in seconds since 1970, by the key's id."""


def key_id(key_hash: str) -> str:
    """Return a key's id: ``key_`` and the first 24 hexadecimal digits (96 bits) of its hash."""
    return f"key_{key_hash[_AFTER_PREFIX : _AFTER_PREFIX + _ID_DIGITS]}"


def join_records(known: Records, others: Iterable[KeyRecord]) -> dict[str, KeyRecord]:
    """Return the records of `known` and `others` in one dict, by id.

    If both have a record of the same key and only one record is revoked, the revoked record is
    returned. Otherwise, the record in `known` is returned. The two records do not differ in other
    fields, because no gateway changes these fields.
    """
    result = dict(known)
    for record in others:
        mine = result.get(record.id)
        if mine is None or (mine.revoked is None and record.revoked is not None):
            result[record.id] = record
    return result


def merge_uses(*several: Uses) -> dict[str, int]:
    """Return the time of the latest use of each key in `several`."""
    result: dict[str, int] = {}
    for uses in several:
        for key, when in uses.items():
            result[key] = max(when, result.get(key, 0))
    return result
