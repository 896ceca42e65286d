"""Stored records and their size limits."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.errors import ConversationTooLarge

DELETED = 2**63 - 1
"""The version of a tombstone, written by `Conversations.delete`. No version follows it."""
FINAL = 2**52
"""The lowest version of an immutable record. Any copy of such a record is current until its
deletion."""
GROWING_PREFIX = "conv_"
"""Id prefix of groups to which any gateway may add. An old copy of such a group may be incomplete.
"""
MAX_READ_BYTES = 32 * 1024 * 1024
"""Bytes of data in one answer of the store, and so of one record."""
MAX_MEMBERS = 10_000
"""Records of one group."""
OVERHEAD_BYTES = 512
"""Bytes counted for each record in addition to its data, for its names and indices."""

TOO_LARGE = (
    f"It is full: a conversation may have as many bytes as a tenant, {{}}, and {MAX_MEMBERS} items."
)

_ID = re.compile(r"[A-Za-z0-9_/-]{1,160}")


class Record(NamedTuple):
    """Stored value of a tenant.

    Attributes:
        id: For example resp_… or conv_…, or a name below one, "resp_…/beat".
        data: The stored bytes; b"" for a tombstone.
        version: Of two copies, the one with the higher version wins; of equal versions, the first.
        group: The id of the conversation or response that the record is a member of.
        order: The position within the group. For a record without group, the time when it began,
            `Conversations.redis_time_ms`; it shows whether a restored record can be trusted to be
            complete.
    """

    id: str
    data: bytes
    version: int = 0
    group: str = ""
    order: int = 0

    @property
    def unit(self) -> str:
        """The unit of eviction and expiry: a group with its head, or the record alone."""
        return self.group or self.id

    @property
    def is_growing(self) -> bool:
        """True if the record belongs to a group to which any gateway may add."""
        return self.unit.startswith(GROWING_PREFIX)

    @property
    def size(self) -> int:
        """Bytes counted toward the tenant's limit."""
        return len(self.data) + OVERHEAD_BYTES


class DiskRecord(NamedTuple):
    """A record as read from the disk copy.

    Attributes:
        tenant: The owner; "" without tenants.
        record: The record.
        used_ms: Last use of its unit, in ms since 1970.
        key: Its key on disk; records written later have higher keys.
    """

    tenant: str
    record: Record
    used_ms: int
    key: int = 0


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_record(record: Record) -> Record:
    """Return the record. Raise ValueError for invalid fields, ConversationTooLarge for too much
    data."""
    if not is_id(record.id) or not (record.group == "" or is_id(record.group)):
        raise ValueError(f"{record.id!r}, {record.group!r}: no id")
    if not (0 <= record.version < 2**63 and 0 <= record.order < 2**63):
        raise ValueError(f"version {record.version}, order {record.order}")
    if len(record.data) > MAX_READ_BYTES:
        raise ConversationTooLarge(
            f"What is to be stored has {len(record.data)} bytes; at most {MAX_READ_BYTES} can be."
        )
    return record
