"""Serialization of the token ids of a chat's turns, which are stored with a conversation.

Each turn is stored as one record: a keyed BLAKE2b hash of the turn's text (16 bytes), the number of
ids (uint32), and the ids (int32 each). All numbers are little-endian. The key of the hash is the
tokenizer's fingerprint, so a gateway with a different tokenizer never finds these ids.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from hashlib import blake2b

_DIGEST = 16
_HEAD = struct.Struct(f"<{_DIGEST}sI")

StoredTurns = Mapping[bytes, bytes]
"""Token ids of turns (int32, little-endian), by the digest of the turn's text."""


def pack(turns: Iterable[tuple[str, array[int]]], fingerprint: bytes, stored: StoredTurns) -> bytes:
    """Return the joined records of the turns that are not in `stored`.

    `fingerprint` is the key of the hashes, at most 64 bytes.
    """
    packed: dict[bytes, bytes] = {}
    for text, ids in turns:
        digest = _digest(text, fingerprint)
        if digest not in stored:
            packed[digest] = _HEAD.pack(digest, len(ids)) + _to_little_endian(ids).tobytes()
    return b"".join(packed.values())


def unpack(data: bytes) -> dict[bytes, bytes]:
    """Return the token ids of turns, by the hash of the turn's text.

    `data` is the concatenated output of one or more calls of `pack`. Raises ValueError if the data
    ends within a record.
    """
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise ValueError("turns end within one")
        digest, count = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        at = start + 4 * count
        if at > len(data):
            raise ValueError("turns end within one")
        found[digest] = data[start:at]
    return found


def ids_of(text: str, fingerprint: bytes, stored: StoredTurns) -> array[int] | None:
    """Return the ids of the turn `text`. Return None if the ids are not stored."""
    record = stored.get(_digest(text, fingerprint))
    if record is None:
        return None
    ids = array("i")
    ids.frombytes(record)
    return _to_little_endian(ids)


def _digest(text: str, fingerprint: bytes) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return blake2b(encoded, digest_size=_DIGEST, key=fingerprint).digest()


def _to_little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return ids
    swapped = array("i", ids)
    swapped.byteswap()
    return swapped
