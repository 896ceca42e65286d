"""Notices of deletions for all gateways, so that no gateway uploads a deleted record from its disk.

``conversations:{.TENANT}:gone``  stream: ids of deleted records (i) and of evicted groups (u);
                                put.lua writes them together with the deletion
``conversations:{all}:gone``      sorted set: tenants with notices, see announce.lua
``conversations:{all}:deleted``   stream of all tenants, written by older releases

Each tenant has its own stream, so a tenant with many deletions loses only its own notices.

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
_BYTES_PER_NOTICE = 4096  # of the tenant's limit: a notice takes some 80, so 2 % of them


class Deletion(NamedTuple):
    """A deleted record or evicted group, to be removed from all disks."""

    tenant: str
    id: str
    is_group: bool


def max_notices(tenant_bytes: int) -> int:
    """Return the maximum number of notices in a tenant's stream."""
    return min(max(tenant_bytes // _BYTES_PER_NOTICE, _MIN_NOTICES), _MAX_NOTICES)


def announce(client: Any, tenant: str, ttl_ms: int) -> None:
    """Announce that a tenant has new notices, for as long as a disk may still hold the records."""
    ANNOUNCE.run(client, [_INDEX], [tenant, ttl_ms * 1000])


class NoticeReader:
    """The position of one gateway in the notices of all tenants. Use from one thread at a time.

    Tenants are read round robin, so that one with many notices does not delay the others.
    """

    def __init__(self, ttl_ms: int) -> None:
        """Start at the first notice. `ttl_ms`: how long a disk stores an unused record."""
        self._ttl_ms = ttl_ms
        self._must_restart = True
        self._seen: float = 0
        self._positions: dict[str, str] = {}
        self._pending: deque[str | None] = deque()

    def restart(self) -> None:
        """Read all notices again: Redis may have lost some and received others since."""
        self._must_restart = True

    def read(self, client: Any, limit: int) -> list[Deletion]:
        """Return some unread notices; empty if all were read."""
        if self._must_restart:
            self._must_restart = False
            self._seen, self._positions = 0, {}
            self._pending.clear()
            # Older releases renew it; it expires after the last of them
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
