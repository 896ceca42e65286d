"""Counter of the wrong keys that each client address has sent within a minute."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

WINDOW_S = 60.0
MAX_ADDRESSES = 1024


class WrongKeys:
    """Numbers of wrong keys by client address. A count ends one minute after its first wrong key.

    At most `MAX_ADDRESSES` addresses are stored. The address whose last wrong key is oldest is
    dropped first. All IPv6 addresses in one /64 network share a count, because such a network
    usually belongs to one machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty counter. `clock` returns a monotonic time in seconds."""
        self._clock = clock
        self._counts: dict[bytes, tuple[float, int]] = {}

    def count(self, address: str | None) -> int:
        """Count a wrong key that a client has sent.

        Return the number of wrong keys from this address in its current minute. A minute starts
        with the first wrong key after the end of the previous minute.
        """
        network, now = _network(address), self._clock()
        began, number = self._counts.pop(network, (now, 0))
        if now - began >= WINDOW_S:
            began, number = now, 0
        self._counts[network] = began, number + 1  # add at the end, so the entry is dropped last
        if len(self._counts) > MAX_ADDRESSES:
            del self._counts[next(iter(self._counts))]
        return number + 1

    def __len__(self) -> int:
        return len(self._counts)


def _network(address: str | None) -> bytes:
    """Return the key under which an address is counted. All invalid addresses share one key."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return b""
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return parsed.packed[:8]
