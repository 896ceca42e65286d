"""Division of a put into pieces: batches of records, each written by one run of a Redis script.

Each run is short, so other clients of Redis are not delayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.conversations.record import DELETED, Record

MAX_RECORDS = 64
"""Maximum number of records per run of a script. Redis takes about 20 us for each record."""
MAX_INLINE_BYTES = 512 * 1024
"""Maximum bytes of data in a script's arguments.

Redis copies arguments three times, which takes 1 ms per MiB.
"""
MAX_COPIED_BYTES = 1024 * 1024
"""Maximum bytes of data that one command writes or reads."""
_MAX_LISTED_BYTES = MAX_INLINE_BYTES // MAX_RECORDS


class Piece(NamedTuple):
    """Batch of records that one run of a script writes atomically.

    Attributes:
        records: The records of this piece.
        staged: Indices of the records whose values are too large for the script's arguments. These
            values are written to Redis before the script runs.
        later_bytes: Total size of the records in later pieces: the bytes that count toward the
            tenant's limit.
        later_units: Number of group members in later pieces, by the name of their unit.
    """

    records: Sequence[Record]
    staged: frozenset[int]
    later_bytes: int
    later_units: Mapping[str, int]


def first_piece(records: Sequence[Record], *, with_later: bool) -> Piece:
    """Return the first piece of `records`.

    If `with_later` is True, the piece includes the totals of all later pieces. With these totals,
    the script can check the limits for all pieces before it writes the first one.
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
