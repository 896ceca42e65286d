"""Number of wrong keys that each address has sent recently."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

WINDOW_S = 60.0
MAX_ADDRESSES = 1024


class WrongKeys:
    """A count for each address, for a minute from its first wrong key.

    At most `MAX_ADDRESSES` are stored; the one that was quiet longest is dropped first. An IPv6
    address counts as its /64, which usually belongs to one machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no counts; `clock` returns seconds."""
        self._clock = clock
        self._counts: dict[bytes, tuple[float, int]] = {}

    def count(self, address: str | None) -> int:
        """Count one more wrong key. Return the number within this minute."""
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
    """Return the key that an address is counted by; all invalid addresses share one."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return b""
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return parsed.packed[:8]
