"""Choice of TCP ports for the servers of the local stack.

Ports that another stack has claimed are not chosen. If possible, neither are ports that the kernel
may give to outgoing connections.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from ops.local_stack.errors import StackError

LOCALHOST = "127.0.0.1"
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Lowest port to choose. Browsers refuse some ports that belong to other protocols; the highest of
# these is 10080.
LOWEST = 10_081


class PortClaims:
    """Ports that this process has claimed, until the end of the `with` statement.

    Two stacks that start at the same time might choose the same port before their servers listen.
    To prevent this, a claim binds a Unix socket to an abstract name that contains the port. Linux
    allows only one socket per abstract name in a network namespace, and releases the name when the
    process ends.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self, port: int) -> int:
        """Claim `port` and return it. Raises StackError if the port is in use."""
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0gateway-up/port/{port}")
            # Use `create_server`, which sets SO_REUSEADDR as Redis, Triton and uvicorn do. A port
            # with connections in TIME_WAIT is then usable.
            with socket.create_server((LOCALHOST, port)):
                pass
        except OSError as error:
            claim.close()
            raise StackError(
                f"port {port} cannot be used ({error.strerror}); is another `gateway up` running?"
            ) from error
        self._claims.append(claim)
        return port

    def take_free(self) -> int:
        """Claim a free port and return it. Raises StackError if none is found.

        If possible, the port is below the kernel's range of ephemeral ports. An outgoing connection
        could otherwise occupy the port while a server restarts.
        """
        ephemeral = int(EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
        highest = ephemeral if ephemeral > LOWEST + 1000 else 65_536
        for port in random.sample(range(LOWEST, highest), 100):
            try:
                return self.take(port)
            except StackError:
                continue
        raise StackError(f"no free port was found between {LOWEST} and {highest - 1}")

    def __enter__(self) -> PortClaims:
        return self

    def __exit__(self, *_: object) -> None:
        for claim in self._claims:
            claim.close()
