"""Limit on the connections of a process, and the choice of the connection to close at the limit.

A connection is either idle (just opened, or its last answer was sent) or has a request in progress.
An idle connection can be closed in favour of a new one without losing a request. Every operation
takes constant time, independent of the number of connections.

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
"""Number of connections above the limit.

They allow health checks, requests for metrics, and admins, which are served even at the limit.
"""

_LOG_INTERVAL_S = 60.0


class ClientConnection(Protocol):
    """Interface of a connection that `Connections` uses."""

    @property
    def address(self) -> str | None:
        """The client's IP address; None on a Unix socket."""

    @property
    def is_slow(self) -> bool:
        """True if the body of a request in progress arrives very slowly or not at all.

        Also true if reading is paused because there is no memory for the body.
        """

    def abort(self) -> None:
        """Close the connection without waiting for unsent data."""

    def evict(self) -> None:
        """Answer the request with 503 and close the connection."""


class Connections:
    """The client connections of one process.

    At most `limit` connections may have a request in progress, and one address may have
    `of_address` connections (0 means any number). Above these limits, only health checks, metrics
    and admins are served. To recognise these, the server must read the request, so
    `RESERVED_CONNECTIONS` more connections may be open. If there are still more, the connection
    that has been idle longest is closed.
    """

    ending = False
    """True while the server shuts down: each connection closes after its next answer."""

    def __init__(self, limit: int, of_address: int = 0) -> None:
        self._limit = limit
        self._of_address = of_address or math.inf
        self._addresses: Counter[str] = Counter()
        # Idle connections, longest idle first. A connection that is in neither `_waiting` nor
        # `_under_way` was aborted.
        self._waiting: OrderedDict[ClientConnection, None] = OrderedDict()
        self._under_way: set[ClientConnection] = set()
        # Connections that were slow once, oldest report first. Some may have become fast since.
        self._slow: OrderedDict[ClientConnection, None] = OrderedDict()
        self._logged_at = self._full_at = -math.inf
        self._full = ""

    def add(self, connection: ClientConnection) -> bool:
        """Add a new connection.

        Return False if the connection must be closed before its request is read.
        """
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
        """Remove a connection that was closed."""
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
        """Return True if `begin` would return True without evicting another connection."""
        if len(self._under_way) >= self._limit:
            return False
        if self._of_address is math.inf:
            return True
        network = _client_network(connection.address)
        return network is None or self._addresses[network] <= self._of_address

    def renew(self, connection: ClientConnection) -> None:
        """Record that a request was refused at once.

        The connection is then the last of the idle ones to be closed.
        """
        if connection in self._waiting:
            self._waiting.move_to_end(connection)

    def mark_slow(self, connection: ClientConnection) -> None:
        """Record that `connection.is_slow` is True. The connection may be evicted at the limit."""
        self._slow.setdefault(connection)

    def end(self, connection: ClientConnection) -> None:
        """Record that the request was answered and the connection is idle."""
        if connection in self._under_way:
            self._under_way.remove(connection)
            self._waiting[connection] = None

    def refuse(self, connection: ClientConnection) -> None:
        """Record that the client was sent an error, and the connection will close.

        The connection is then the first of the idle ones to be aborted.
        """
        self.end(connection)
        if connection in self._waiting:
            self._waiting.move_to_end(connection, last=False)

    def _evict_slow(self, newcomer: ClientConnection) -> bool:
        """Evict the connection that has been slow longest, except `newcomer`.

        Return False if there is no slow connection.
        """
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
        """Message for operators while the limit is reached, and for a minute after; or empty."""
        return self._full if time.monotonic() - self._full_at < _LOG_INTERVAL_S else ""

    def _report(self, what: str) -> None:
        now = self._full_at = time.monotonic()
        self._full = f"AS MANY CONNECTIONS AS GATEWAY_MAX_CONNECTIONS ALLOWS: {what}"
        if now - self._logged_at > _LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("%s", self._full)


def _client_network(address: str | None) -> str | None:
    """Return the network of an address, which counts as one client.

    The network is a single IPv4 address, or the /64 of an IPv6 address. None stays None.
    """
    if address is None or ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64))
