"""Division of records into pieces that each take Redis little time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.conversations.record import DELETED, Record

MAX_RECORDS = 64
"""Records that one script writes or reads: some 20 us of Redis each."""
MAX_INLINE_BYTES = 512 * 1024
"""Bytes that a script takes as arguments. They are copied three times, which takes 1 ms per MiB."""
MAX_COPIED_BYTES = 1024 * 1024
"""Bytes of a value that one command writes or reads. Redis also copies them to its log on disk."""
_MAX_LISTED_BYTES = MAX_INLINE_BYTES // MAX_RECORDS


class Piece(NamedTuple):
    """Records that one script writes, all or none.

    Attributes:
        records: The records of this piece.
        staged: Indices in `records` of values that are too large for arguments.
        later_bytes: Counted bytes of the records in later pieces.
        later_units: New members in later pieces, by unit.
    """

    records: Sequence[Record]
    staged: frozenset[int]
    later_bytes: int
    later_units: Mapping[str, int]


def first_piece(records: Sequence[Record], *, with_later: bool) -> Piece:
    """Return the first piece of many records. `with_later` reserves space for all of them."""
    some = records[:MAX_RECORDS]
    is_large = sum([len(each.data) for each in some]) > MAX_INLINE_BYTES
    staged = [n for n, each in enumerate(some) if is_large and len(each.data) > _MAX_LISTED_BYTES]
    # Deletions only free memory.
    later = [each for each in records[MAX_RECORDS:] if with_later and each.version != DELETED]
    units = Counter[str]()
    for each in later:
        units[each.unit] += bool(each.group)
    return Piece(some, frozenset(staged), sum([each.size for each in later]), units)
