"""Division of a list of records into pieces: each piece is written by one run of a Redis script.

While a script runs, Redis serves no other client. A piece is therefore small, so that one run takes
only a few milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.conversations.record import DELETED, Record

MAX_RECORDS = 64
"""Maximum number of records that one run of a script writes.

A script takes about 20 us for each record, and Redis serves no other client meanwhile.
"""
MAX_INLINE_BYTES = 512 * 1024
"""Maximum bytes of records that a script gets as arguments.

Redis copies the arguments of a script three times. This takes 1 ms per MiB, and Redis serves no
other client meanwhile.
"""
MAX_COPIED_BYTES = 1024 * 1024
"""Maximum bytes of data that one command writes or reads."""
_MAX_LISTED_BYTES = MAX_INLINE_BYTES // MAX_RECORDS


class Piece(NamedTuple):
    """Batch of records that one run of a script writes atomically.

    Attributes:
        records: The records of this piece.
        staged: Indices of the records whose data are too large for the script's arguments. These
            data are written to temporary keys in Redis before the script runs.
        later_bytes: Size in bytes of the records in all later pieces; 0 if not computed.
        later_units: Number of records of each group in all later pieces, by the group's name; empty
            if not computed.
    """

    records: Sequence[Record]
    staged: frozenset[int]
    later_bytes: int
    later_units: Mapping[str, int]


def first_piece(records: Sequence[Record], *, with_later: bool) -> Piece:
    """Return the first piece of `records`.

    If `with_later` is True, also compute `later_bytes` and `later_units`. The script that writes
    the first piece uses these totals: if all records together exceed a limit, it writes nothing.
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
