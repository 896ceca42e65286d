"""Records of which stored responses and conversations consist, and limits of their size."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.errors import ConversationTooLarge

DELETED = 2**63 - 1
"""Version of a tombstone, which replaces a deleted record.

The highest version of a record wins. A tombstone has the highest possible version, so an old copy
of the record cannot replace it.
"""
FINAL = 2**52
"""Lowest version of immutable records. An immutable record can be deleted, but not changed."""
GROWING_PREFIX = "conv_"
"""Prefix of the ids of conversations.

Any gateway may add records to a conversation. One gateway's copy of a conversation may therefore
lack records that another gateway has added.
"""
MAX_READ_BYTES = 32 * 1024 * 1024
"""Maximum bytes of data that one read of the store returns, and maximum bytes of one record."""
MAX_MEMBERS = 10_000
"""Maximum number of records in one group, which is a conversation or response."""
OVERHEAD_BYTES = 512
"""Bytes that are counted per record in addition to its data, for names and indices."""

TOO_LARGE = (
    f"It is full: a conversation may have as many bytes as a tenant, {{}}, and {MAX_MEMBERS} items."
)

_ID = re.compile(r"[A-Za-z0-9_/-]{1,160}")


class Record(NamedTuple):
    """Piece of data that the store saves for a tenant, such as a response or a conversation item.

    Attributes:
        id: Id of the record, for example "resp_…" or "conv_…", or a longer name that begins with
            such an id ("resp_…/beat").
        data: The stored bytes; b"" for a tombstone.
        version: Number that decides between two copies of a record: the higher version wins. If the
            versions are equal, the copy that was stored first wins.
        group: Id of the conversation or response to which the record belongs; "" without a group.
        order: Number by which the records of a group are sorted. A record without a group has its
            time of creation here, by Redis' clock (`Conversations.redis_time_ms`). After a loss of
            data in Redis, this time shows if the record may be incomplete.
    """

    id: str
    data: bytes
    version: int = 0
    group: str = ""
    order: int = 0

    @property
    def unit(self) -> str:
        """Name of the record's unit: the id of its group, or its own id if it has no group.

        All records of a unit expire together and are evicted together. A unit also includes the
        group's head: the record whose id is the group's id, and whose `group` is empty.
        """
        return self.group or self.id

    @property
    def is_growing(self) -> bool:
        """True if the record belongs to a conversation, not to a response.

        Any gateway may add records to a conversation.
        """
        return self.unit.startswith(GROWING_PREFIX)

    @property
    def size(self) -> int:
        """Bytes counted toward the tenant's limit."""
        return len(self.data) + OVERHEAD_BYTES


class DiskRecord(NamedTuple):
    """A record as read from this gateway's disk.

    Attributes:
        tenant: Name of the tenant that owns the record; "" on a gateway without tenants.
        record: The record.
        used_ms: Time at which any record of the same `Record.unit` was last used, in ms since 1970.
        key: Number of the record on disk. Records that were written later have higher keys.
    """

    tenant: str
    record: Record
    used_ms: int
    key: int = 0


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_record(record: Record) -> Record:
    """Return the record unchanged, if it is valid.

    Raises:
        ValueError: A field is invalid.
        ConversationTooLarge: The record has more than `MAX_READ_BYTES` bytes of data.
    """
    if not is_id(record.id) or not (record.group == "" or is_id(record.group)):
        raise ValueError(f"{record.id!r}, {record.group!r}: no id")
    if not (0 <= record.version < 2**63 and 0 <= record.order < 2**63):
        raise ValueError(f"version {record.version}, order {record.order}")
    if len(record.data) > MAX_READ_BYTES:
        raise ConversationTooLarge(
            f"What is to be stored has {len(record.data)} bytes; at most {MAX_READ_BYTES} can be."
        )
    return record
