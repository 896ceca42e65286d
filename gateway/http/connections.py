"""Limit on the client connections of a process.

At the limit, an idle connection is closed to accept a new one. A connection is idle if it was just
opened or if its last response was sent, so closing it loses no request. Every operation takes
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
"""Number of additional connections that may be open when a limit of `Connections` is reached.

They are reserved for health checks, requests for metrics, and requests of admins. These requests
are served even if a limit is reached.
"""

_LOG_INTERVAL_S = 60.0


class ClientConnection(Protocol):
    """Interface that the class `Connections` requires of a connection."""

    @property
    def address(self) -> str | None:
        """The client's IP address; None on a Unix socket."""

    @property
    def is_slow(self) -> bool:
        """True if the body of the request in progress arrives very slowly or not at all.

        Also True while reading is paused because the buffer for the body is full. Otherwise, such a
        connection could never be evicted.
        """

    def abort(self) -> None:
        """Close the connection at once. Unsent data is lost."""

    def evict(self) -> None:
        """Answer the request in progress with 503, and close the connection."""


class Connections:
    """The client connections of one process.

    `limit` is the maximum number of connections with a request in progress. `of_address` is the
    maximum number of connections of one client address; 0 means no maximum. Above a maximum, only
    health checks, requests for metrics, and requests of admins are served. The server must read a
    request to recognise these, so `RESERVED_CONNECTIONS` additional connections may be open. If the
    reserved connections of the process are also in use, the connection that has been idle longest
    is closed.
    """

    ending = False
    """True while the server shuts down. Each connection then closes after its next response."""

    def __init__(self, limit: int, of_address: int = 0) -> None:
        self._limit = limit
        self._of_address = of_address or math.inf
        self._addresses: Counter[str] = Counter()
        # Idle connections, longest idle first.
        self._waiting: OrderedDict[ClientConnection, None] = OrderedDict()
        # Connections with a request in progress. Closed connections are in neither collection.
        self._under_way: set[ClientConnection] = set()
        # Connections that were passed to `mark_slow`, in the order of the calls. A connection may
        # be fast again, so check `is_slow` before evicting it.
        self._slow: OrderedDict[ClientConnection, None] = OrderedDict()
        self._logged_at = self._full_at = -math.inf
        self._full = ""

    def add(self, connection: ClientConnection) -> bool:
        """Add a new connection. If too many are open, close the connection that is idle longest.

        Return False if the caller must refuse the new connection without reading its request.
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
        """Remove a closed connection. Does nothing if the connection was removed before."""
        if connection in self._waiting or connection in self._under_way:
            self._forget(connection)

    def begin(self, connection: ClientConnection) -> bool:
        """Record that a connection has received the headers of a request.

        If the connection limit is reached, evict a slow connection. Return False if there is no
        slow connection, or if the client's address has too many connections. If the result is
        False, the caller must refuse the request. Exceptions are health checks, requests for
        metrics, and requests of admins.
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
        """Mark an idle connection as the most recently used one.

        Call this after refusing a request without parsing it, because `begin` and `end` are not
        called for such a request. If too many connections are open, less recently used connections
        are closed first.
        """
        if connection in self._waiting:
            self._waiting.move_to_end(connection)

    def mark_slow(self, connection: ClientConnection) -> None:
        """Record that `connection.is_slow` is True.

        If the connection limit is reached, `begin` may then evict this connection.
        """
        self._slow.setdefault(connection)

    def end(self, connection: ClientConnection) -> None:
        """Mark a connection as idle, because its request was answered."""
        if connection in self._under_way:
            self._under_way.remove(connection)
            self._waiting[connection] = None

    def refuse(self, connection: ClientConnection) -> None:
        """Record that an error was sent to the client, and that the connection will close.

        If too many connections are open, this connection is aborted before other idle connections.
        """
        self.end(connection)
        if connection in self._waiting:
            self._waiting.move_to_end(connection, last=False)

    def _evict_slow(self, newcomer: ClientConnection) -> bool:
        """Evict a slow connection. Try connections in the order of the calls of `mark_slow`.

        Connections that are no longer slow are skipped. `newcomer` is never evicted. Return False
        if no other connection is slow.
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
        """Message for operators that the connection limit is reached.

        Empty if this limit was not reached within the last minute.
        """
        return self._full if time.monotonic() - self._full_at < _LOG_INTERVAL_S else ""

    def _report(self, what: str) -> None:
        now = self._full_at = time.monotonic()
        self._full = f"AS MANY CONNECTIONS AS GATEWAY_MAX_CONNECTIONS ALLOWS: {what}"
        if now - self._logged_at > _LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("%s", self._full)


def _client_network(address: str | None) -> str | None:
    """Return the network that counts as one client: an IPv4 address, or the /64 of an IPv6 address.

    Return None if `address` is None.
    """
    if address is None or ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64))
