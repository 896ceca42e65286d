"""Notices in Redis about deleted records, so that all gateways delete them from their disks.

Without these notices, a gateway might upload a deleted record from its disk to Redis again. The
notices are in these keys of Redis:

``conversations:{.TENANT}:gone``  stream of one tenant's notices. A notice has either the field `i`,
                                the id of a deleted record, or the field `u`, the id of an evicted
                                conversation. The script put.lua deletes a record and adds the
                                notice in the same run.
``conversations:{all}:gone``      sorted set of the tenants that have notices, by the time of their
                                last notice
``conversations:{all}:deleted``   stream of all tenants' notices, written by older releases only

The length of a stream is limited: new notices displace old ones. Each tenant has its own stream, so
a tenant with many deletions displaces only its own notices.

See decision 069 in docs/decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.conversations.record import is_id
from gateway.conversations.scripts import ANNOUNCE

_INDEX = "conversations:{all}:gone"
_OLD_STREAM = "conversations:{all}:deleted"
_TENANTS_AT_ONCE = 64
_MIN_NOTICES, _MAX_NOTICES = 1000, 100_000
# A tenant's stream may have one notice for each 4096 bytes that the tenant may store. A notice
# takes about 80 bytes, so the notices take at most 2 % of the memory for the tenant's records.
_BYTES_PER_NOTICE = 4096


class Deletion(NamedTuple):
    """A notice about a deleted record, or about a group (a conversation) that Redis has evicted.

    Every gateway must remove this record or group from its disk. `id` is the id of the record or
    the group.
    """

    tenant: str
    id: str
    is_group: bool


def max_notices(tenant_bytes: int) -> int:
    """Return the maximum number of notices in a tenant's stream."""
    return min(max(tenant_bytes // _BYTES_PER_NOTICE, _MIN_NOTICES), _MAX_NOTICES)


def announce(client: Any, tenant: str, ttl_ms: int) -> None:
    """Announce to all gateways that a tenant has new notices.

    Args:
        client: The Redis client.
        tenant: The tenant's name.
        ttl_ms: Milliseconds for which gateways must be able to read the notices. Later, no gateway
            needs them, because the deleted records have expired on all disks.
    """
    ANNOUNCE.run(client, [_INDEX], [tenant, ttl_ms * 1000])


class NoticeReader:
    """Reader of the notices of all tenants. Each call of `read` returns further notices.

    Use an instance in one thread at a time. The streams are read in round-robin order, so a tenant
    with many notices does not delay the notices of other tenants.
    """

    def __init__(self, ttl_ms: int) -> None:
        """Create a reader that has not read any notice yet.

        `ttl_ms` is the time in milliseconds for which a disk stores an unused record.
        """
        self._ttl_ms = ttl_ms
        self._must_restart = True
        self._seen: float = 0
        self._positions: dict[str, str] = {}
        self._pending: deque[str | None] = deque()

    def restart(self) -> None:
        """Let the next `read` start at the oldest notices again.

        Call this when Redis may have lost data: the stored positions are then no longer valid.
        """
        self._must_restart = True

    def read(self, client: Any, limit: int) -> list[Deletion]:
        """Return at most `limit` unread notices of one tenant.

        The list is empty only if no tenant has unread notices.
        """
        if self._must_restart:
            self._must_restart = False
            self._seen, self._positions = 0, {}
            self._pending.clear()
            # Let the stream of older releases expire. If a gateway of an older release still runs,
            # it extends the stream's time to live, so the stream remains.
            client.pexpire(_OLD_STREAM, self._ttl_ms)
        if not self._pending:
            self._find_tenants(client)
        while self._pending:
            tenant = self._pending.popleft()
            stream = _OLD_STREAM if tenant is None else _stream(tenant)
            position = self._positions.get(stream, "0")
            entries = client.xrange(stream, min=f"({position}", count=limit)
            if len(entries) == limit:
                self._pending.append(tenant)
            if entries:
                self._positions[stream] = entries[-1][0].decode()
            if deletions := [
                each for _, fields in entries if (each := _parse_notice(tenant, fields))
            ]:
                return deletions
        return []

    def _find_tenants(self, client: Any) -> None:
        self._pending.append(None)
        news = client.zrangebyscore(
            _INDEX, f"({self._seen:.0f}", "+inf", start=0, num=_TENANTS_AT_ONCE, withscores=True
        )
        for name, announced in news:
            self._pending.append(name.decode(errors="replace"))
            self._seen = announced


def _stream(tenant: str) -> str:
    return f"conversations:{{.{tenant}}}:gone"


def _parse_notice(tenant: str | None, fields: Mapping[bytes, bytes]) -> Deletion | None:
    tenant_field, id_, unit = (
        fields.get(name, b"").decode(errors="replace") for name in (b"t", b"i", b"u")
    )
    name = unit or id_
    return (
        Deletion(tenant_field if tenant is None else tenant, name, bool(unit))
        if is_id(name)
        else None
    )
