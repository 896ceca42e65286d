"""Records in pieces, each of which costs Redis little at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.conversations.record import Record

MAX_RECORDS = 64
"""Records that one script puts or reads: some 20 us of Redis each."""
MAX_INLINE_BYTES = 512 * 1024
"""Bytes that a script takes as arguments: they are copied three times, which takes 1 ms a MiB."""
MAX_COPIED_BYTES = 1024 * 1024
"""Bytes of a value that one command writes or reads. Redis copies them to its log on disk, too."""
_MAX_LISTED_BYTES = MAX_INLINE_BYTES // MAX_RECORDS


class Piece(NamedTuple):
    """Records that one script puts, all or none.

    Attributes:
        records: those of this piece.
        staged: the indexes in `records` of those whose values are too large to be arguments.
        later_bytes: the bytes that records of later pieces count for.
        later_units: for each unit of those its new members.
    """

    records: Sequence[Record]
    staged: frozenset[int]
    later_bytes: int
    later_units: Mapping[str, int]


def first_piece(records: Sequence[Record], *, with_later: bool) -> Piece:
    """Return the first records of many; `with_later` asks for the memory of all of them."""
    some = records[:MAX_RECORDS]
    is_large = sum([len(each.data) for each in some]) > MAX_INLINE_BYTES
    staged = [n for n, each in enumerate(some) if is_large and len(each.data) > _MAX_LISTED_BYTES]
    later = records[MAX_RECORDS:] if with_later else []
    units = Counter[str]()
    for each in later:
        units[each.unit] += bool(each.group)
    return Piece(some, frozenset(staged), sum([each.size for each in later]), units)
