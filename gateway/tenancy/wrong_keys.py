"""How many wrong keys an address has sent lately."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

WINDOW_S = 60.0
MAX_ADDRESSES = 1024


class WrongKeys:
    """A count for each address, from its first wrong key on for a minute.

    Of `MAX_ADDRESSES` at most; the one that was quiet longest is forgotten first. An IPv6 address
    stands for its /64, all of which one machine usually has.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._counts: dict[bytes, tuple[float, int]] = {}

    def count(self, address: str | None) -> int:
        """One more wrong key; returns how many there were in this minute."""
        network, now = _network(address), self._clock()
        began, number = self._counts.pop(network, (now, 0))
        if now - began >= WINDOW_S:
            began, number = now, 0
        self._counts[network] = began, number + 1  # behind all others
        if len(self._counts) > MAX_ADDRESSES:
            del self._counts[next(iter(self._counts))]
        return number + 1

    def __len__(self) -> int:
        return len(self._counts)


def _network(address: str | None) -> bytes:
    """What is no address is one and the same."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return b""
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return parsed.packed[:8]
