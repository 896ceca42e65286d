"""What is kept, and its bounds."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.errors import ConversationTooLarge

DELETED = 2**63 - 1
"""The version of what `Conversations.delete` leaves: nothing follows."""
FINAL = 2**52
"""The least version of what changes no more until it is deleted: any copy of it is as good."""
GROWING_PREFIX = "conv_"
"""What the ids of groups begin with to which any gateway may add: an old copy is not all of it."""
MAX_READ_BYTES = 32 * 1024 * 1024
"""Bytes of data in one answer of the store, and so of one record."""
MAX_MEMBERS = 10_000
"""Records of one group."""
OVERHEAD_BYTES = 512
"""Bytes that a record counts for beside its data: its names and what finds it again."""

TOO_LARGE = (
    "There is no room for more in it: a conversation may have as many bytes as a tenant, {}, and "
    f"{MAX_MEMBERS} items."
)

_ID = re.compile(r"[A-Za-z0-9_/-]{1,160}")


class Record(NamedTuple):
    """One thing that an API keeps for a tenant.

    Attributes:
        id: such as resp_… and conv_…, or a name below one, "resp_…/beat".
        data: what the API keeps; b"" says that it was deleted.
        version: wherever two copies meet the higher one stays, of equal ones the first.
        group: the id of the conversation or response whose member it is.
        order: its place within the group. Of what is in none, when it began, as
            `Conversations.time` was then: what changes is then known to be all there.
    """

    id: str
    data: bytes
    version: int = 0
    group: str = ""
    order: int = 0

    @property
    def unit(self) -> str:
        """What lives and goes together: a group with the record that it is called by."""
        return self.group or self.id

    @property
    def is_growing(self) -> bool:
        """Whether it is of what no old copy is all of."""
        return self.unit.startswith(GROWING_PREFIX)

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return len(self.data) + OVERHEAD_BYTES


class StoredRecord(NamedTuple):
    """A record as a copy has it.

    Attributes:
        tenant: "" where there are none.
        used_ms: when its unit was used last, in ms since 1970.
        key: its place on the disk; a later one was written later.
    """

    tenant: str
    record: Record
    used_ms: int
    key: int = 0


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_record(record: Record) -> Record:
    """Raises ValueError for what no store takes, ConversationTooLarge for too much data."""
    if not is_id(record.id) or not (record.group == "" or is_id(record.group)):
        raise ValueError(f"{record.id!r}, {record.group!r}: no id")
    if not (0 <= record.version < 2**63 and 0 <= record.order < 2**63):
        raise ValueError(f"version {record.version}, order {record.order}")
    if len(record.data) > MAX_READ_BYTES:
        raise ConversationTooLarge(
            f"What is to be kept has {len(record.data)} bytes; at most {MAX_READ_BYTES} can be."
        )
    return record
