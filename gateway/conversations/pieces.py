"""Division of a put into pieces: groups of records that one Redis script writes in a short time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.conversations.record import DELETED, Record

MAX_RECORDS = 64
"""Maximum number of records that one script writes or reads. Each takes Redis about 20 us."""
MAX_INLINE_BYTES = 512 * 1024
"""Maximum bytes of data in a script's arguments. Redis copies them three times: 1 ms per MiB."""
MAX_COPIED_BYTES = 1024 * 1024
"""Maximum bytes that one command writes or reads. Redis also copies them to its log on disk."""
_MAX_LISTED_BYTES = MAX_INLINE_BYTES // MAX_RECORDS


class Piece(NamedTuple):
    """Records that one script writes, all or none.

    Attributes:
        records: The records of this piece.
        staged: Indices of the records that are too large for the script's arguments. Their values
            are written to Redis before the script runs.
        later_bytes: Bytes of the records in later pieces, as they count toward the tenant's limit.
        later_units: Number of members in later pieces, by the name of their unit.
    """

    records: Sequence[Record]
    staged: frozenset[int]
    later_bytes: int
    later_units: Mapping[str, int]


def first_piece(records: Sequence[Record], *, with_later: bool) -> Piece:
    """Return the first piece of `records`.

    With `with_later`, the piece has the totals of the remaining records, so that the script can
    check the limits for all of them.
    """
    some = records[:MAX_RECORDS]
    is_large = sum([len(each.data) for each in some]) > MAX_INLINE_BYTES
    staged = [n for n, each in enumerate(some) if is_large and len(each.data) > _MAX_LISTED_BYTES]
    # Leave deletions out of the totals, because they only free memory.
    later = [each for each in records[MAX_RECORDS:] if with_later and each.version != DELETED]
    units = Counter[str]()
    for each in later:
        units[each.unit] += bool(each.group)
    return Piece(some, frozenset(staged), sum([each.size for each in later]), units)
