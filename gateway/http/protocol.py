"""uvicorn's HTTP/1.1 protocol with limits on size and time, and errors in OpenAI's envelope.

`UNDOCUMENTED` lists what this file uses of uvicorn that its documentation does not promise.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, cast

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from gateway.errors import GatewayError
from gateway.http.connections import Connections
from gateway.http.errors import (
    HeadersTooLarge,
    MalformedRequest,
    SlowRequest,
    TooManyConnections,
)
from gateway.http.head import check_head, framing
from gateway.http.parser import RequestParser

UNDOCUMENTED: Mapping[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        *("connection_made", "connection_lost", "data_received", "shutdown"),
        *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
        *("on_response_complete", "send_400_response"),
        *("connections", "cycle", "expect_100_continue", "flow", "headers", "loop", "parser"),
        *("pipeline", "scope", "transport", "url"),
    ),
    RequestResponseCycle: (
        *("disconnected", "keep_alive", "message_event", "response_complete", "response_started"),
    ),
    FlowControl: ("drain", "read_paused", "write_paused"),
}
"""And STATUS_LINE, bytes by status."""

Answer = Callable[[GatewayError], tuple[int, dict[str, str], bytes]]
"""Gives the status, headers and body of what a connection answers itself."""

MAX_HEAD = 64 * 1024
"""Bytes of a request's URL and headers, or of a chunked body's trailers."""

SLOWEST_BODY = 64 * 1024
"""Bytes that a body must bring in the time that it has, unless it ends."""

_BRISK_BODY = 16 * 1024
# Seconds after which a body that brings fewer of those in each of them lags.
_BRISK_AFTER = 2

_LINGER_S = 1.0
# An empty deque takes 3 % of the memory of a connection with a stream.
_NO_PIPELINE: deque[Any] = deque(maxlen=0)
CHUNKS = "gateway.chunks"
"""The extension in an ASGI scope that holds its `ChunkWriter`."""
NO_ROOM = "gateway.no_room"
"""The extension in an ASGI scope of a request that is one too many: only what is answered always,
whatever else goes on, is to be answered."""


class ChunkWriter:
    """Writes chunks of a body that has been begun the ASGI way, and must be ended that way.

    A streamed token passes no middleware then: five wrapped `send`s, a message in a dict and what
    uvicorn asks of it took 8 of the 30 us that a token cost the gateway (`make bench`).
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        # No reference to the cycle, whose scope has one to this: whatever the request holds would
        # wait for the garbage collector.
        self._write = transport.write
        self._flow = flow
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None

    def write(self, body: bytes) -> bool:
        """False when `drain` should be awaited before the next one."""
        if not self.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(body), body))
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Returns once the client has taken enough, or has left."""
        if not self.disconnected:
            await self._flow.drain()

    def disconnect(self) -> None:
        """The client has left."""
        self.disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()


class Phase(Enum):
    """What a connection waits for from its client."""

    IDLE = 0
    """Nothing: it is between requests, or the answer is being made."""
    HEAD = 1
    BODY = 2


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Patience, in seconds."""

    head: float = 10.0
    """From connecting, or from a request's first byte, to the end of its headers."""
    body: float = 60.0
    """To the end of a body, or to the next `SLOWEST_BODY` bytes of it."""
    write: float = 60.0
    """In which a client takes nothing of an answer that waits for it."""


class HttpProtocol(HttpToolsProtocol):
    """A connection whose client may be slow, greedy or hostile.

    httptools sets no limits by itself, uvicorn none on time. One request at a time: what comes
    behind a request that is not answered yet is not read, and the connection closes after that
    answer, as RFC 9112 allows (9.3.2). No client of ours pipelines, and an attacker would have
    hundreds of requests queued with a few kilobytes.
    """

    _pending = 0
    """Bytes of the reads since something was complete, without the read that held its end."""
    _phase = Phase.HEAD
    _heard = 0
    """Bytes in this phase; of a body, since its patience was last renewed."""
    _waited = 0
    """Calls of `check` in this phase, or since that."""
    _unsent = 0
    _stuck = 0
    """Calls of `check` since `_unsent`, the bytes that wait for the client, last changed."""
    framing: tuple[bytes, bytes] | None = None
    """See `RequestParser`."""
    _refused = False
    _ending = False
    """Whether the server ends, and this connection after the answer that is under way."""
    _chunks: ChunkWriter | None = None
    """Of the last request."""
    _error: GatewayError | None = None
    """What stopped the parser, where that was us."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        connections: Connections,
        answer: Answer,
    ) -> None:
        """`connections` are all of this process.

        `answer` gives the status, headers and body of what this connection answers itself.
        """
        super().__init__(config, server_state, app_state, _loop)
        self.pipeline = _NO_PIPELINE
        self.parser = RequestParser(self)
        self._limits = limits
        self._all = connections
        self._answer_to = answer

    @property
    def address(self) -> str | None:
        return None if self.client is None else self.client[0]

    @property
    def lags(self) -> bool:
        if self._phase is not Phase.BODY or self._waited < _BRISK_AFTER:
            return False
        # Whoever is not read from cannot be slow, but holds its place with no work for it.
        return self.flow.read_paused or self._heard < self._waited * _BRISK_BODY

    def cut(self) -> None:
        # Closing would wait for a client that does not take its answer.
        self.transport.abort()

    def give_way(self) -> None:
        self._refuse(TooManyConnections())

    def check(self) -> None:
        """To be called once a second: ends what takes too long.

        Calls are counted and not the time, so that a process that was stopped or busy does not
        hold that against its clients; and a connection costs no timer of its own.
        """
        self._check_writing()
        if self._refused or self._phase is Phase.IDLE:
            return
        self._waited += 1
        limits = self._limits
        if self._phase is Phase.HEAD and self._waited > limits.head:
            if self._heard:
                self._refuse(SlowRequest(f"The headers took more than {limits.head:g} s."))
            else:
                self.transport.close()  # an answer to nothing could be taken for the next one's
        elif self._phase is Phase.BODY and self._waited > limits.body:
            # Whoever is not read from cannot be slow.
            if self._heard < SLOWEST_BODY and not self.flow.read_paused:
                self._refuse(SlowRequest(f"The body came too slowly for {limits.body:g} s."))
            else:
                self._waited = self._heard = 0
        elif self.lags:
            self._all.lag(self)

    def _check_writing(self) -> None:
        """Only while nothing is added to what waits, so that any change is the client's doing."""
        left = 0
        if self.flow.write_paused or self.transport.is_closing():
            left = self.transport.get_write_buffer_size()
        if left != self._unsent or not left:
            self._unsent, self._stuck = left, 0
            return
        self._stuck += 1
        if self._stuck > self._limits.write:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.add(self):
            self._refuse(TooManyConnections())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.remove(self)
        if self._chunks is not None:
            self._chunks.disconnect()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        self._pending += len(data)
        self._heard += len(data)
        super().data_received(data)
        if self._pending > MAX_HEAD and not self._refused:
            self._refuse(HeadersTooLarge(MAX_HEAD))

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._pending = self._heard = self._waited = 0

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop(MalformedRequest("A second request came before the first was answered."))
        if self._phase is Phase.HEAD:
            self._pending = 0  # empty lines before a request
        else:
            self._enter(Phase.HEAD)
            self._heard = 1  # it began in the read that ended the one before
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers: whoever checked those has not seen these (RFC 9110, 6.5.1).
        if self._phase is Phase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._pending = 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD:
            self._stop(HeadersTooLarge(MAX_HEAD))
        try:
            check_head(self.parser.get_http_version(), self.headers)
        except MalformedRequest as error:
            self._stop(error)
        offers = self.parser.should_upgrade()
        if offers:
            self.framing = framing(self.headers)
            if self.framing is not None and self.parser.get_method() == b"CONNECT":
                self._stop(MalformedRequest("CONNECT: not offered here."))
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # it would be taken for the answer (RFC 9110, 10.1.1)
        super().on_headers_complete()
        self._enter(Phase.BODY)
        if offers and self.framing is None:
            # The client may go on in the other protocol.
            self.cycle.keep_alive = False
        self._chunks = ChunkWriter(self.transport, self.flow)
        extensions: dict[str, object] = {CHUNKS: self._chunks}
        if not self._all.begin(self):
            extensions[NO_ROOM] = True
        # ASGI's types know extensions as dictionaries only.
        self.scope["extensions"] = cast(Any, extensions)

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.framing is not None:
            return  # the body is still to come, from another parser
        self._enter(Phase.IDLE)
        super().on_message_complete()

    def shutdown(self) -> None:
        """The server ends. Answers that begin now say that they are their connection's last.

        Those that began before could not, so the client may send one more request the moment it
        has one; and on an idle connection a request may be on its way. Closing would lose it.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._linger()
        elif cycle.response_started:
            self._ending = True
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._all.end(self)
        if self._ending:
            self._ending = False
            self._linger()

    def _linger(self) -> None:
        self.loop.call_later(_LINGER_S, super().shutdown)

    def _stop(self, error: GatewayError) -> NoReturn:
        """Ends the parser; uvicorn then calls send_400_response."""
        self._error = error
        raise ValueError

    def send_400_response(self, msg: str) -> None:
        """For what is not HTTP, or must not be read; uvicorn's own answer is plain text."""
        self._refuse(self._error or MalformedRequest(msg))

    def _refuse(self, error: GatewayError) -> None:
        """Reads no more; answers, where that cannot be taken for another request's answer."""
        self._refused = True
        cycle = self.cycle
        if cycle is not None and self._phase is Phase.BODY:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        elif cycle is not None and not cycle.response_complete:
            cycle.keep_alive = False
            return
        self._send(error)
        self._all.refuse(self)
        # A connection that is closed with data unread is reset, and the answer lost with it.
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _send(self, error: GatewayError) -> None:
        status, more, body = self._answer_to(error)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": secrets.token_hex(16),
            "connection": "close",
        } | more
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        self.transport.write(STATUS_LINE[status] + "".join(lines).encode() + b"\r\n" + body)
