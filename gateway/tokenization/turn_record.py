"""Serialization of the token ids of a chat's turns, which are stored with a conversation.

Each turn is written as: a keyed BLAKE2b of its text (16 bytes), the number of ids (uint32), and the
ids (int32 each), all little-endian. The key is the tokenizer's fingerprint, so ids of another
tokenizer are never found.
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
    """Return the record of the turns that are not in `stored`.

    `fingerprint`, the key of the digests, has at most 64 bytes.
    """
    packed: dict[bytes, bytes] = {}
    for text, ids in turns:
        digest = _digest(text, fingerprint)
        if digest not in stored:
            packed[digest] = _HEAD.pack(digest, len(ids)) + _to_little_endian(ids).tobytes()
    return b"".join(packed.values())


def unpack(kept: bytes) -> dict[bytes, bytes]:
    """Return the ids by digest, given the output of one or several calls of `pack`, concatenated.

    Raises ValueError if the data ends within a turn.
    """
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(kept):
        if at + _HEAD.size > len(kept):
            raise ValueError("turns end within one")
        digest, count = _HEAD.unpack_from(kept, at)
        start = at + _HEAD.size
        at = start + 4 * count
        if at > len(kept):
            raise ValueError("turns end within one")
        found[digest] = kept[start:at]
    return found


def ids_of(text: str, fingerprint: bytes, stored: StoredTurns) -> array[int] | None:
    """Return the ids of a turn; None if they are not stored."""
    kept = stored.get(_digest(text, fingerprint))
    if kept is None:
        return None
    ids = array("i")
    ids.frombytes(kept)
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
