"""Ports for the stack's servers, picked so that no other stack and no client takes them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from ops.local_stack.errors import StackError

LOCALHOST = "127.0.0.1"
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_081  # browsers refuse some ports below, of other protocols: 10080 is the last


class PortClaims:
    """Ports that belong to this process until the `with` ends, whoever listens on them.

    A claim is a name in Linux' abstract socket namespace, which is scoped like the ports
    themselves and vanishes with the process: two stacks that start at once cannot both pick
    a port in the seconds before their servers listen.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self, port: int) -> int:
        """Claims `port` and returns it. Raises StackError when it is in use."""
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0gateway-up/port/{port}")
            # Redis, Triton and uvicorn set this too: connections in TIME_WAIT do not matter.
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
        """Claims any free port.

        It lies below the kernel's ephemeral range where possible, so that no outgoing
        connection can sit on it while a server restarts.
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
