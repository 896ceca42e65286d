"""Limit on the connections of a process, and which connection to close when it is reached.

A connection is either idle (just opened, or its answer was sent) or has a request under way. An
idle connection can be closed for a new one without losing anything. Every operation here takes
constant time, independent of the number of connections.

See decision 086 in docs/decisions.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import time
from collections import Counter, OrderedDict
from typing import Protocol

log = logging.getLogger(__name__)

RESERVED_CONNECTIONS = 64
"""Connections above the limit, for health checks, metrics and admins, which are always served."""

_LOG_INTERVAL_S = 60.0


class ClientConnection(Protocol):
    """A connection as `Connections` uses it."""

    @property
    def address(self) -> str | None:
        """The client's IP address; None on a Unix socket."""

    @property
    def is_slow(self) -> bool:
        """True if the body of a request under way arrives very slowly or not at all.

        Reading may also be paused because the body waits for memory.
        """

    def abort(self) -> None:
        """Close the connection without waiting for unsent data."""

    def evict(self) -> None:
        """Answer the request with 503 and close the connection."""


class Connections:
    """The client connections of one process.

    At most `limit` connections may have a request under way, and one address may have `of_address`
    connections (0 means any number). Above that, only health checks, metrics and admins are served.
    The request must be read to decide, so `RESERVED_CONNECTIONS` more may be open. Above those, the
    connection that has been idle longest is closed.
    """

    ending = False
    """True while the server shuts down: each connection closes after its next answer."""

    def __init__(self, limit: int, of_address: int = 0) -> None:
        self._limit = limit
        self._of_address = of_address or math.inf
        self._addresses: Counter[str] = Counter()
        # Idle connections, longest idle first. A connection in neither collection was aborted.
        self._waiting: OrderedDict[ClientConnection, None] = OrderedDict()
        self._under_way: set[ClientConnection] = set()
        # Oldest report first. A connection may have become fast again.
        self._slow: OrderedDict[ClientConnection, None] = OrderedDict()
        self._logged_at = self._full_at = -math.inf
        self._full = ""

    def add(self, connection: ClientConnection) -> bool:
        """Add a new connection; return False if it must be closed before its request is read."""
        self._waiting[connection] = None
        network = _client_network(connection.address)
        if network is not None:
            self._addresses[network] += 1
            if self._addresses[network] > self._of_address + RESERVED_CONNECTIONS:
                return False
        if len(self._waiting) + len(self._under_way) <= self._limit + RESERVED_CONNECTIONS:
            return True
        oldest = next(iter(self._waiting))
        if oldest is connection:
            self._report("new ones are refused")
            return False
        self._report("those are closed that have been idle longest")
        self._forget(oldest)
        oldest.abort()
        return True

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection that was closed."""
        if connection in self._waiting or connection in self._under_way:
            self._forget(connection)

    def begin(self, connection: ClientConnection) -> bool:
        """Record that a request's headers arrived.

        Return False if the request may only be served if it is a health check, metrics or an
        admin's.
        """
        self._waiting.pop(connection, None)
        self._under_way.add(connection)
        if self._of_address is not math.inf:
            network = _client_network(connection.address)
            if network is not None and self._addresses[network] > self._of_address:
                return False
        return len(self._under_way) <= self._limit or self._evict_slow(connection)

    def can_begin(self, connection: ClientConnection) -> bool:
        """Return True if `begin` would, without evicting another connection."""
        if len(self._under_way) >= self._limit:
            return False
        if self._of_address is math.inf:
            return True
        network = _client_network(connection.address)
        return network is None or self._addresses[network] <= self._of_address

    def renew(self, connection: ClientConnection) -> None:
        """Record that a request was refused at once: the connection is the least idle one now."""
        if connection in self._waiting:
            self._waiting.move_to_end(connection)

    def mark_slow(self, connection: ClientConnection) -> None:
        """Record that `connection.is_slow` is True, so that it may be evicted."""
        self._slow.setdefault(connection)

    def end(self, connection: ClientConnection) -> None:
        """Record that the request was answered and the connection is idle."""
        if connection in self._under_way:
            self._under_way.remove(connection)
            self._waiting[connection] = None

    def refuse(self, connection: ClientConnection) -> None:
        """Record that the connection was sent an error and closes; it is the next to be aborted."""
        self.end(connection)
        if connection in self._waiting:
            self._waiting.move_to_end(connection, last=False)

    def _evict_slow(self, newcomer: ClientConnection) -> bool:
        """Evict the connection that has been slow longest; return False without a slow one."""
        while self._slow:
            oldest, _ = self._slow.popitem(last=False)
            if oldest is not newcomer and oldest in self._under_way and oldest.is_slow:
                self._report("those give way whose bodies do not come")
                oldest.evict()
                return True
        self._report("further requests get 503")
        return False

    def _forget(self, connection: ClientConnection) -> None:
        self._waiting.pop(connection, None)
        self._under_way.discard(connection)
        self._slow.pop(connection, None)
        network = _client_network(connection.address)
        if network is not None:
            self._addresses[network] -= 1
            if not self._addresses[network]:
                del self._addresses[network]

    @property
    def problem(self) -> str:
        """Message for operators while the limit is reached and for a minute after; else empty."""
        return self._full if time.monotonic() - self._full_at < _LOG_INTERVAL_S else ""

    def _report(self, what: str) -> None:
        now = self._full_at = time.monotonic()
        self._full = f"AS MANY CONNECTIONS AS GATEWAY_MAX_CONNECTIONS ALLOWS: {what}"
        if now - self._logged_at > _LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("%s", self._full)


def _client_network(address: str | None) -> str | None:
    """Return the network that counts as one client: an IPv4 address, or an IPv6 /64."""
    if address is None or ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64))
