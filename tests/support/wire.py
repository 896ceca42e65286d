"""A proxy that can interrupt connections without closing them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ops.local_stack.ports import LOCALHOST

_CHUNK = 64 * 1024


class Wire:
    """Connections to `endpoint` (host:port) that pass no data while the wire is cut."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Yield the proxy's own endpoint."""
        server = await asyncio.start_server(self._serve, LOCALHOST, 0)
        try:
            yield f"{LOCALHOST}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            host, port = self.endpoint.split(":")
            there = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))
        except (OSError, asyncio.CancelledError):
            pass  # one end has closed, or the test has ended
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
