"""Pool of HTTP/2 connections to one Triton server.

The pool opens a further connection when all connections have reached the server's limit of
concurrent streams. It replaces lost connections.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TypeVar

from gateway.errors import EngineError, EngineUnavailable
from gateway.triton.failures import Status, no_connection
from gateway.triton.http2 import headers
from gateway.triton.http2.call import PREFIX, PieceCall, RpcCall
from gateway.triton.http2.connection import Http2Connection
from gateway.triton.transport import (
    CONNECT_TIMEOUT_S,
    NO_METADATA,
    ConnectionOptions,
    Endpoint,
    Message,
    Metadata,
    message_bytes,
)

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
# Milliseconds after which the kernel ends a connection whose sent data is not acknowledged. This
# detects hosts that have disappeared. Pings cannot be used, because Triton ends idle connections
# that send pings.
_UNACKNOWLEDGED_MS = 20_000

T = TypeVar("T")


class Http2Transport:
    """Implementation of `transport.Transport` over HTTP/2. The first call opens a connection."""

    def __init__(self, endpoint: Endpoint, options: ConnectionOptions) -> None:
        """Prepare the transport.

        Raise OSError if a certificate cannot be read, and ValueError for metadata that gRPC does
        not allow.
        """
        self._endpoint = endpoint
        self._tls = options.load_tls() if endpoint.tls else None
        self._metadata = headers.metadata_block(options.metadata)
        self._blocks: dict[str, bytes] = {}
        self._connections: list[Http2Connection] = []
        self._dial_task: asyncio.Task[bool] | None = None
        self._failures = 0
        self._why = "closed"
        self._retry_at = 0.0
        self._closed = False

    async def stream(
        self,
        path: str,
        request: Message,
        parse: Callable[[bytes], T],
        metadata: Metadata,
        by: float | None = None,
    ) -> RpcCall[T]:
        extra = headers.metadata_block(metadata) if metadata else b""
        return await self._call(path, request, partial(RpcCall, parse=parse), extra, by)

    async def pieces(
        self, path: str, request: Message, metadata: Metadata, by: float | None = None
    ) -> RpcCall[bytes]:
        extra = headers.metadata_block(metadata) if metadata else b""
        return await self._call(path, request, partial(PieceCall, parse=bytes), extra, by)

    async def unary(
        self, path: str, request: bytes, timeout_s: float, metadata: Metadata = NO_METADATA
    ) -> bytes:
        extra = headers.timeout_field(timeout_s)
        if metadata:
            extra += headers.metadata_block(metadata)
        async with asyncio.timeout(timeout_s):
            call = await self._call(path, [request], partial(RpcCall, parse=bytes), extra)
            try:
                reply = await call.read()
                # Read once more, because the RPC's status comes after the response.
                more = await call.read()
            except EngineUnavailable:
                if call.status == Status.DEADLINE_EXCEEDED:
                    raise TimeoutError from None
                raise
            finally:
                call.cancel()
        if reply is None or more is not None:
            raise EngineError("The inference server did not answer with one message.")
        return reply

    def disconnect(self) -> None:
        for connection in list(self._connections):
            connection.close("the server does not answer")

    async def close(self) -> None:
        self._closed = True
        if self._dial_task is not None:
            self._dial_task.cancel()
        for connection in self._connections:
            connection.close("closed here")
        await asyncio.gather(*[connection.gone.wait() for connection in self._connections])

    async def _call(
        self,
        path: str,
        request: Message,
        make: Callable[[Http2Connection], RpcCall[T]],
        extra: bytes,
        by: float | None = None,
    ) -> RpcCall[T]:
        size = message_bytes(request)
        connection = self._find_free_connection()
        while connection is None:
            async with asyncio.timeout_at(by):
                await self._connect()
            connection = self._find_free_connection()
        call = make(connection)
        prefix = PREFIX.pack(0, size)
        connection.open(call, self._block(path) + extra, [prefix, *request], len(prefix) + size)
        return call

    def _block(self, path: str) -> bytes:
        block = self._blocks.get(path)
        if block is None:
            endpoint = self._endpoint
            block = headers.request_block(path, endpoint.authority, tls=endpoint.tls)
            block = self._blocks[path] = block + self._metadata
        return block

    def _find_free_connection(self) -> Http2Connection | None:
        """Return the first connection on which a call can be opened. Return None if there is none.

        The first connections in the list therefore get most calls. The last connections, which were
        added under load, become idle when the load decreases.
        """
        for connection in self._connections:
            if connection.can_open:
                return connection
        return None

    async def _connect(self) -> None:
        """Open one more connection, or wait for a connection attempt that is in progress.

        Raise EngineUnreachable if the attempt fails. During a pause after a failed attempt, raise
        EngineUnreachable at once. The first caller after the pause starts the next attempt. All
        other callers during this attempt get EngineUnreachable at once, too.
        """
        if self._dial_task is None:
            if self._closed or asyncio.get_running_loop().time() < self._retry_at:
                raise no_connection(self._why)
            # Use an empty context. asyncio calls a connection's protocol in the context of the task
            # that has opened the connection. With the context of this request, all log lines of the
            # connection would have the request's id, and the request's data would remain in memory.
            self._dial_task = asyncio.create_task(self._dial(), context=Context())
        elif self._failures:
            raise no_connection(self._why)
        # Shield the attempt: if this caller is cancelled, other callers may still wait for it.
        if not await asyncio.shield(self._dial_task):
            raise no_connection(self._why)

    async def _dial(self) -> bool:
        connection = Http2Connection(self._on_connection_change)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._reach(connection)
                # Wait for the server's settings, which have its limit of concurrent streams.
                await connection.settled.wait()
            if not connection.can_open:
                raise ConnectionError(self._explain_unusable(connection))
        except (OSError, TimeoutError) as error:
            connection.abort()
            self._failures += 1
            pause = min(_FIRST_BACKOFF_S * 1.6 ** (self._failures - 1), _MAX_BACKOFF_S)
            self._retry_at = loop.time() + pause * random.uniform(0.8, 1.2)
            self._why = _reason(error)
            if self._failures == 1:
                log.warning("no connection to %s: %s", self._endpoint.authority, self._why)
            return False
        except asyncio.CancelledError:  # `close` has cancelled this task, but not the callers
            connection.abort()
            return False
        else:
            self._failures = 0
            self._connections.append(connection)
            return True
        finally:
            self._dial_task = None

    async def _reach(self, connection: Http2Connection) -> None:
        """Connect to the first address of the endpoint's host that accepts the connection.

        Raise OSError if no address does.
        """
        loop = asyncio.get_running_loop()
        port = self._endpoint.port
        context = None if self._tls is None else self._tls.value.context
        # Look up the name here. If `create_connection` did it and was cancelled, its lookup would
        # continue, and asyncio would log an error whenever a slow name server fails.
        infos = await loop.getaddrinfo(self._endpoint.host, port, type=socket.SOCK_STREAM)
        why = OSError("the name has no address")
        for address in dict.fromkeys(str(info[4][0]) for info in infos):
            try:
                transport, _ = await loop.create_connection(
                    lambda: connection,
                    address,
                    port,
                    ssl=context,
                    server_hostname=None if context is None else self._endpoint.name,
                )
            except OSError as error:
                why = error
            else:
                _prepare(transport)
                return
        raise why

    def _explain_unusable(self, connection: Http2Connection) -> str:
        why = connection.why_closed or "the server takes no streams"
        if connection.greeted or self._tls is not None:
            return why
        # Suggest a likely cause: Triton's HTTP port closes gRPC connections without an answer.
        return f"{why}; is this Triton's HTTP port, or one with TLS (grpcs://)?"

    def _on_connection_change(self, connection: Http2Connection) -> None:
        if connection.gone.is_set():
            if connection in self._connections:
                self._connections.remove(connection)
        elif (
            connection.idle
            and not connection.closed
            and any(other.can_open for other in self._connections if other is not connection)
        ):
            connection.close("not needed any more")


def _reason(error: OSError | TimeoutError) -> str:
    text = str(error)
    # Search the text, too, because asyncio may combine the errors of several addresses into one.
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in text:
        return "connection refused"
    return text or f"no answer in {CONNECT_TIMEOUT_S:g} seconds"


def _prepare(transport: asyncio.BaseTransport) -> None:
    tls = transport.get_extra_info("ssl_object")
    if tls is not None and tls.selected_alpn_protocol() != "h2":
        raise ConnectionError("the server does not speak HTTP/2 over TLS")
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock = transport.get_extra_info("socket")
        if sock is None:  # uvloop returns None if the connection is already closed
            raise ConnectionError("the server closed the connection at once")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
