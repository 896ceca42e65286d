"""Acceptor of client connections for a busy event loop.

While the loop is busy, several waiting connections are accepted per iteration of the loop. In this
module, a "turn" is one iteration of the event loop.

See decision 057 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

# Accept one connection for each 0.5 ms that the last turn took. Accepting and refusing a connection
# costs 0.2 ms of CPU, so a flood of connections uses less than half of the loop's time.
_TURN_S_PER_CONNECTION = 0.0005
_MAX_PER_TURN = 64


class Backlog:
    """Acceptor of connections that wait in the kernel's accept queue of one listening socket.

    uvloop's server accepts only one connection per iteration of the event loop (a "turn"). Idle
    worker processes can then accept the other connections. If all workers are busy, turns are long,
    and connections would wait in the queue for seconds. The gateway cannot refuse a connection
    before accepting it. While the loop is busy, this class therefore accepts additional
    connections. Their number grows with the length of the turn.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare to accept connections of a socket on which a uvloop server also listens.

        Args:
            listener: the listening socket. This class uses a duplicate, so the server may close the
                original.
            make_protocol: builds the asyncio protocol for a new connection.
            tls: returns the TLS context for new connections, or None if TLS is not configured.
            clock: returns the current time in seconds.
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
        """Begin to check for more connections. The server calls this for each accepted connection.

        The following iterations of the event loop are measured. After each long iteration,
        additional connections are accepted, because they may wait in the kernel's queue.
        """
        self._is_busy = True
        if not self._has_turn:
            self._has_turn = True
            self._turn_began = self._clock()
            asyncio.get_running_loop().call_soon(self._turn)

    def close(self) -> None:
        """Stop accepting connections: close this class's duplicate of the listening socket.

        Closing only the server's socket is not enough. The kernel continues to queue connections
        while any duplicate of the socket is open.
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
            except OSError:  # queue empty, socket closed, or no file descriptor free
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
