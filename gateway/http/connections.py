"""How many connections a process has, and which goes when there are as many as it takes.

A connection waits for its client (it has just come, or has had its answer) or it has a request
under way. One that waits costs its client nothing, so it may be closed for another. All that is
done for a connection or a request takes the same time however many there are.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import time
from collections import Counter, OrderedDict
from typing import Protocol

log = logging.getLogger(__name__)

RESERVED = 64
"""Connections beyond the limit, for what is answered always: health, metrics and admins."""

_TELL_AGAIN_S = 60.0


class Connection(Protocol):
    @property
    def address(self) -> str | None:
        """The client's IP address; None on a socket that has none."""

    @property
    def lags(self) -> bool:
        """Whether it has a request under way whose body does not come: its client sends very
        slowly, or it is not read from, because there is no room for it."""

    def cut(self) -> None:
        """Ends it at once."""

    def give_way(self) -> None:
        """Answers that there is no room for its request, and ends it."""


class Connections:
    """Those of one process.

    Up to `limit` may have a request under way, and an address may have `of_address` connections (0
    for any number); of what comes beyond, only what is answered always is to be answered. To find
    that out there is room for `RESERVED` more. When that is full too, the one that has waited for
    its client longest goes first.
    """

    ending = False
    """Whether the server ends: answers that begin now are the last ones of their connections."""

    def __init__(self, limit: int, of_address: int = 0) -> None:
        self._limit = limit
        self._of_address = of_address or math.inf
        self._addresses: Counter[str] = Counter()
        # The one that has waited longest comes first. What is in neither has been cut.
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._under_way: set[Connection] = set()
        # Those that were found to lag, by when; some may lag no more.
        self._lagging: OrderedDict[Connection, None] = OrderedDict()
        self._told = self._full_at = -math.inf
        self._full = ""

    def add(self, connection: Connection) -> bool:
        """A client has connected. False when there is no room even to hear what it wants."""
        self._waiting[connection] = None
        network = _network(connection.address)
        if network is not None:
            self._addresses[network] += 1
            if self._addresses[network] > self._of_address + RESERVED:
                return False
        if len(self._waiting) + len(self._under_way) <= self._limit + RESERVED:
            return True
        oldest = next(iter(self._waiting))
        if oldest is connection:
            self._tell("new ones are refused")
            return False
        self._tell("those are closed that have been idle longest")
        self._forget(oldest)
        oldest.cut()
        return True

    def remove(self, connection: Connection) -> None:
        """It is gone."""
        if connection in self._waiting or connection in self._under_way:
            self._forget(connection)

    def begin(self, connection: Connection) -> bool:
        """The head of a request has come. False when only what is answered always should be."""
        self._waiting.pop(connection, None)
        self._under_way.add(connection)
        if self._of_address is not math.inf:
            network = _network(connection.address)
            if network is not None and self._addresses[network] > self._of_address:
                return False
        return len(self._under_way) <= self._limit or self._make_room(connection)

    def has_room(self, connection: Connection) -> bool:
        """Return True if `begin` would, without taking room from another connection."""
        if len(self._under_way) >= self._limit:
            return False
        if self._of_address is math.inf:
            return True
        network = _network(connection.address)
        return network is None or self._addresses[network] <= self._of_address

    def renew(self, connection: Connection) -> None:
        """A request of this connection was refused at once: it is not the longest idle any more."""
        if connection in self._waiting:
            self._waiting.move_to_end(connection)

    def lag(self, connection: Connection) -> None:
        """It `lags`."""
        self._lagging.setdefault(connection)

    def end(self, connection: Connection) -> None:
        """Its request has been answered."""
        if connection in self._under_way:
            self._under_way.remove(connection)
            self._waiting[connection] = None

    def refuse(self, connection: Connection) -> None:
        """It has been told that nothing more is read from it, and is the first to be cut."""
        self.end(connection)
        if connection in self._waiting:
            self._waiting.move_to_end(connection, last=False)

    def _make_room(self, newcomer: Connection) -> bool:
        """Has one that lags give way."""
        while self._lagging:
            oldest, _ = self._lagging.popitem(last=False)
            if oldest is not newcomer and oldest in self._under_way and oldest.lags:
                self._tell("those give way whose bodies do not come")
                oldest.give_way()
                return True
        self._tell("further requests get 503")
        return False

    def _forget(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._under_way.discard(connection)
        self._lagging.pop(connection, None)
        network = _network(connection.address)
        if network is not None:
            self._addresses[network] -= 1
            if not self._addresses[network]:
                del self._addresses[network]

    @property
    def problem(self) -> str:
        """A text while there are too many connections, and for a minute after; else empty."""
        return self._full if time.monotonic() - self._full_at < _TELL_AGAIN_S else ""

    def _tell(self, what: str) -> None:
        now = self._full_at = time.monotonic()
        self._full = f"AS MANY CONNECTIONS AS GATEWAY_MAX_CONNECTIONS ALLOWS: {what}"
        if now - self._told > _TELL_AGAIN_S:
            self._told = now
            log.warning("%s", self._full)


def _network(address: str | None) -> str | None:
    """What one client has for itself: an address of IPv4, or of IPv6 the first half of one."""
    if address is None or ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64))
