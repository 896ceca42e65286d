"""Acceptance of several connections in one iteration ("turn") of a busy event loop.

See decision 057 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

# For each such number of seconds that the last turn took, one connection is accepted. Accepting and
# refusing a connection costs 0.2 ms of CPU, so a flood of connections takes less than half of the
# loop's time.
_TURN_S_PER_CONNECTION = 0.0005
_MAX_PER_TURN = 64


class Backlog:
    """Connections in the kernel's queue of one listening socket.

    uvloop's servers accept one connection in each turn of the event loop, which leaves connections
    for idle workers. The turns of a busy loop are long: connections would wait in the kernel's
    queue for seconds, where they cannot be refused. While the loop is busy, this class therefore
    accepts more connections, depending on the length of the turns.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Accept connections beside the server of a listening socket.

        Args:
            listener: the socket. A duplicate is used, so the server may close it.
            make_protocol: builds the protocol of a new connection.
            tls: returns the TLS context for new connections; None without TLS.
            clock: returns the time in seconds.
        """
        self._listener = listener.dup()
        self._listener.setblocking(False)
        self._make_protocol = make_protocol
        self._tls = tls
        self._clock = clock
        self._has_turn = self._is_busy = False
        self._turn_began = 0.0
        self._tasks: set[asyncio.Task[object]] = set()

    def note_connection(self) -> None:
        """Record that the server has accepted a connection, so further ones may wait."""
        self._is_busy = True
        if not self._has_turn:
            self._has_turn = True
            self._turn_began = self._clock()
            asyncio.get_running_loop().call_soon(self._turn)

    def close(self) -> None:
        """Accept no more connections.

        This closes the duplicate of the socket: the kernel queues connections while any is open.
        """
        self._listener.close()

    def _turn(self) -> None:
        now = self._clock()
        count = int((now - self._turn_began) / _TURN_S_PER_CONNECTION)
        self._turn_began = now
        self._has_turn, self._is_busy = self._is_busy, False
        if not self._has_turn:
            return
        loop = asyncio.get_running_loop()
        loop.call_soon(self._turn)
        for _ in range(min(count, _MAX_PER_TURN)):
            try:
                taken, _ = self._listener.accept()
            except OSError:  # no connection waits, the socket is closed, or no descriptor is free
                return
            self._is_busy = True
            task = loop.create_task(self._connect(loop, taken))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, loop: asyncio.AbstractEventLoop, taken: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(self._make_protocol, taken, ssl=self._tls())
        except (OSError, ssl.SSLError):  # the client has disconnected, or the TLS handshake failed
            taken.close()
