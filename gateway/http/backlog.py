"""Takes connections from the kernel's queue faster than one in each turn of the event loop.

See decision 057 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable

# One connection for so many seconds that a turn took. To take and refuse one costs 0.2 ms of CPU,
# so that a flood of connections gets less than half of the loop's time.
_TURN_S_PER_CONNECTION = 0.0005
_MAX_PER_TURN = 64


class Backlog:
    """The connections of one listening socket that its server has not taken yet.

    uvloop's servers take one connection in each turn of the loop, so that idle workers find some.
    Turns of a busy loop are long. Its connections would wait in the kernel for seconds, where
    nobody can refuse them.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Share `listener` with its server. `tls` returns what new connections are served with."""
        self._listener = listener.dup()
        self._listener.setblocking(False)
        self._make_protocol = make_protocol
        self._tls = tls
        self._clock = clock
        self._has_turn = self._is_busy = False
        self._turn_began = 0.0
        self._tasks: set[asyncio.Task[object]] = set()

    def note_connection(self) -> None:
        """Take note that the server has taken a connection: more may wait."""
        self._is_busy = True
        if not self._has_turn:
            self._has_turn = True
            self._turn_began = self._clock()
            asyncio.get_running_loop().call_soon(self._turn)

    def close(self) -> None:
        """Take no more. While the socket is open here, the kernel still queues connections."""
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
            except OSError:  # none waits, it is closed, or there are no descriptors
                return
            self._is_busy = True
            task = loop.create_task(self._connect(loop, taken))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, loop: asyncio.AbstractEventLoop, taken: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(self._make_protocol, taken, ssl=self._tls())
        except (OSError, ssl.SSLError):  # it has left, or has failed to agree on TLS
            taken.close()
