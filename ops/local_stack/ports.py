"""Ports for the stack's servers, chosen to avoid ports of other stacks and of clients."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from ops.local_stack.errors import StackError

LOCALHOST = "127.0.0.1"
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Lowest port to choose. Browsers refuse some ports of other protocols, the highest is 10080.
LOWEST = 10_081


class PortClaims:
    """Ports claimed by this process until the `with` ends.

    A claim prevents two stacks that start at the same time from choosing the same port before their
    servers listen. The claim is a name in Linux' abstract socket namespace: that has the same
    scope as ports, and the kernel releases the name when the process ends.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self, port: int) -> int:
        """Claim `port` and return it. Raises StackError when it is in use."""
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0gateway-up/port/{port}")
            # `create_server` sets SO_REUSEADDR, as Redis, Triton and uvicorn do: connections in
            # TIME_WAIT do not make a port unusable.
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

        The port is below the kernel's ephemeral range if possible. Otherwise an outgoing connection
        could occupy it while a server restarts.
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
