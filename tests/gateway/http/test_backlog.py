"""Connections that wait in the kernel while the event loop is busy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from gateway.http.backlog import Backlog

CONNECTIONS = 100


class Connected(asyncio.Protocol):
    def __init__(self, made: list[asyncio.BaseTransport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(transport)


class Listening:
    """A uvloop server with waiting connections and a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made: list[asyncio.BaseTransport] = []

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Backlog]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(2 * CONNECTIONS)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(CONNECTIONS)]
            backlog = Backlog(listener, self.make, lambda: None, clock=lambda: self.now)

            def take() -> asyncio.Protocol:
                backlog.note_connection()
                return self.make()

            loop = asyncio.get_running_loop()
            server = await loop.create_server(take, sock=listener)
            try:
                yield backlog
            finally:  # open connections keep uvloop from ending
                backlog.close()
                server.close()
                for transport in self.made:
                    transport.close()
                for client in clients:
                    client.close()

    def make(self) -> asyncio.Protocol:
        return Connected(self.made)

    async def turn(self, seconds: float) -> int:
        """Return how many connections one turn of the loop accepts. The turn lasts `seconds`."""
        before = len(self.made)
        self.now += seconds
        await asyncio.sleep(0)
        return len(self.made) - before


@pytest.mark.parametrize(("turn_s", "most_turns"), [(0.005, 20), (0.02, 10), (1.0, 8)])
def test_a_busy_loop_takes_many_connections_in_a_turn(turn_s: float, most_turns: int) -> None:
    async def check() -> None:
        listening = Listening()
        async with listening.begin():
            taken = [await listening.turn(turn_s) for _ in range(most_turns)]
            assert sum(taken) == CONNECTIONS, taken
            assert max(taken) <= 1 + 64

    uvloop.run(check())


def test_an_idle_loop_leaves_connections_to_other_workers() -> None:
    async def check() -> None:
        listening = Listening()
        async with listening.begin():
            taken = [await listening.turn(0.0001) for _ in range(20)]
            assert max(taken) <= 1, taken

    uvloop.run(check())


def test_none_is_taken_after_the_end() -> None:
    async def check() -> None:
        listening = Listening()
        async with listening.begin() as backlog:
            await listening.turn(0.02)
            backlog.close()
            assert max([await listening.turn(0.02) for _ in range(5)]) <= 1

    uvloop.run(check())
