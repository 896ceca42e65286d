"""HTTP/1.1 connections of an ASGI application, with limits on size and time.

uvicorn listens, runs the event loop, and creates an `HttpProtocol` for each connection. Errors of a
connection are sent in OpenAI's format.

See decisions 036 and 084 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import secrets
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway.errors import GatewayError, InternalError, ShuttingDown
from gateway.http.connections import Connections
from gateway.http.exchange import (
    EXCHANGE,
    OVER_CONNECTION_LIMIT,
    STATUS_LINES,
    App,
    Exchange,
    Http10Exchange,
)
from gateway.http.head import check_head, find_framing
from gateway.http.http_errors import (
    HeadersTooLarge,
    MalformedRequest,
    SlowRequest,
    TooManyConnections,
)
from gateway.http.parser import RequestParser
from gateway.http.start_gate import StartGate

BuildErrorResponse = Callable[[GatewayError], tuple[int, dict[str, str], bytes]]
"""Function that builds the status, headers and body for an error that a connection sends itself."""


MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of a request's URL and headers, and of the excessive framing of a chunked body."""

MIN_BODY_BYTES_PER_PERIOD = 64 * 1024
"""Bytes of a body that must arrive in each period of `ConnectionLimits.body` seconds."""

# Rate below which a body counts as slow, so that its connection may be evicted.
_MIN_BODY_BYTES_PER_S = 16 * 1024
# Ratio of received bytes to body bytes above which the framing of a chunked body is excessive.
# Chunks of one byte have a ratio of 6.
_MAX_FRAMING_RATIO = 8
# A body does not count as slow in its first seconds.
_SLOW_AFTER_S = 2

_LINGER_S = 1.0
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Phase(Enum):
    """Part of a request for which a connection waits."""

    IDLE = 0
    """The connection is between requests, or the request is complete and has no answer yet."""
    HEAD = 1
    BODY = 2


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts of a connection, in seconds."""

    head: float = 10.0
    """Time from connecting, or from a request's first byte, to the end of its headers."""
    body: float = 60.0
    """Time for a body to end, or for its next `MIN_BODY_BYTES_PER_PERIOD` bytes."""
    write: float = 60.0
    """Time for which a client may read nothing although a part of an answer waits to be sent."""
    idle: float = 75.0
    """Time from an answer to the next request.

    This timeout is longer than those of clients and proxies (httpx: 5 s, load balancers: 60 s), so
    that they close idle connections first. If the server did, it could lose a request that is being
    sent.
    """


class HttpProtocol(asyncio.Protocol):
    """Connection of a client, which may be slow or hostile.

    All limits are enforced here, because httptools has none. A connection serves one request at a
    time. Pipelining is refused: if a second request arrives before the first one is answered, it is
    not read, and the connection closes after the first answer, as RFC 9112 (9.3.2) allows. Known
    clients do not pipeline, and an attacker could queue hundreds of requests with a few KB.
    """

    # Slots save memory, which matters with many idle connections.
    __slots__ = (
        "_app",
        "_app_state",
        "_build_error",
        "_checks",
        "_client",
        "_closes_after_answer",
        "_closes_after_body",
        "_connections",
        "_error",
        "_exchange",
        "_gate",
        "_headers",
        "_limits",
        "_loop",
        "_pending",
        "_phase",
        "_read",
        "_read_paused",
        "_received",
        "_scheme",
        "_server",
        "_state",
        "_stopped_reading",
        "_stuck_checks",
        "_unsent",
        "_url",
        "_writable",
        "address",
        "framing",
        "parser",
        "transport",
        "write_paused",
    )

    transport: asyncio.Transport

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        app: App,
        limits: ConnectionLimits,
        connections: Connections,
        build_error: BuildErrorResponse,
        gate: StartGate | None = None,
    ) -> None:
        """Create the protocol for a new connection.

        Args:
            config: uvicorn's configuration; unused. uvicorn passes the first four arguments.
            server_state: uvicorn's sets of connections and tasks.
            app_state: values for `state` in the scope of each request.
            _loop: the event loop; None for the running one.
            app: the ASGI application.
            limits: timeouts.
            connections: all connections of this process.
            build_error: builds the answers for errors that this connection sends itself.
            gate: decides when a request begins. With None, each request begins at once.
        """
        self.parser: httptools.HttpRequestParser = RequestParser(self)
        self._loop = _loop or asyncio.get_running_loop()
        self._state = server_state
        self._app_state = app_state
        self._app = app
        self._limits = limits
        self._connections = connections
        self._build_error = build_error
        self._gate = gate
        self._read = b""
        """Data that the parser reads now, if it starts with the first byte of a request.

        Set only while the gate is busy, so that the gate can cache the request's head; otherwise
        empty.
        """
        self.address: str | None = None
        """The client's IP address; None on a Unix socket."""
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int | None] = "", None
        self._scheme = "http"
        self._pending = 0
        """Bytes that count toward `MAX_HEAD_BYTES`. Reset whenever a head or body is complete.

        In a head, these are all received bytes. In a body, these are the received bytes in excess
        of `_MAX_FRAMING_RATIO` times the bytes of the body.
        """
        self._phase = Phase.HEAD
        self._received = 0
        """Bytes received in this phase; for a body, since its timeout was last restarted."""
        self._checks = 0
        """Number of calls of `check` in this phase, or since the timeout was last restarted."""
        self._unsent = 0
        """Bytes in the write buffer at the last `check`."""
        self._stuck_checks = 0
        """Number of calls of `check` since `_unsent` last changed."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self.framing: tuple[bytes, bytes] | None = None
        """See `RequestParser`."""
        self._exchange: Exchange | None = None
        """The request in progress; None between a complete answer and the next request."""
        self._read_paused = False
        self._writable: asyncio.Event | None = None
        """Event that is set once the full write buffer has space again; None if it is not full."""
        self._stopped_reading = False
        """True if all further received data is ignored."""
        self._closes_after_body = False
        """True if the request was answered before its body had arrived, and the connection closes
        at the end of the body."""
        self._closes_after_answer = False
        """True if the server shuts down, and the connection closes after the answer in progress."""
        self._error: GatewayError | None = None
        """The error for which this protocol has stopped the parser."""
        # An attribute instead of a property, because it is read for each token.
        self.write_paused = False

    @property
    def is_slow(self) -> bool:
        if self._phase is not Phase.BODY or self._checks < _SLOW_AFTER_S:
            return False
        # While reading is paused, the rate says nothing about the client. The connection counts as
        # slow nevertheless: it counts toward the limit, so it may have to be evicted.
        return self._read_paused or self._received < self._checks * _MIN_BODY_BYTES_PER_S

    def abort(self) -> None:
        # Use `abort`, because `close` would wait for a client that does not read its answer.
        self.transport.abort()

    def evict(self) -> None:
        self._refuse(TooManyConnections())

    def check(self) -> None:
        """Close the connection if a timeout has passed. Must be called once a second.

        Timeouts are measured by counting the calls. Time in which this process was stopped or busy
        therefore does not count, and a connection needs no timer of its own.
        """
        self._check_writing()
        if self._stopped_reading or (self._phase is Phase.IDLE and self._exchange is not None):
            return
        self._checks += 1
        limits = self._limits
        if self._phase is Phase.IDLE:
            if self._checks > limits.idle:
                self.transport.close()
        elif self._phase is Phase.HEAD and self._checks > limits.head:
            if self._received:
                self._refuse(SlowRequest(f"The headers took more than {limits.head:g} s."))
            else:
                # Send no error: the client could take it for the answer to its next request.
                self.transport.close()
        elif self._phase is Phase.BODY and self._checks > limits.body:
            # The timeout starts again if enough bytes arrived, or if reading is paused. The rest of
            # a body whose request was answered already gets only one period.
            wanted = self._exchange is not None
            if not wanted or (self._received < MIN_BODY_BYTES_PER_PERIOD and not self._read_paused):
                self._refuse(SlowRequest(f"The body came too slowly for {limits.body:g} s."))
            else:
                self._checks = self._received = 0
        elif self.is_slow:
            self._connections.mark_slow(self)

    def _check_writing(self) -> None:
        """Abort the connection if the client reads nothing for `limits.write` seconds.

        This is measured only while no data is added to the write buffer. Each change of the buffer
        then shows that the client has read something.
        """
        unsent = 0
        if self.write_paused or self.transport.is_closing():
            unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not unsent:
            self._unsent, self._stuck_checks = unsent, 0
            return
        self._stuck_checks += 1
        if self._stuck_checks > self._limits.write:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._client = _get_address(transport, "peername")
        self.address = self._client and self._client[0]
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        # A Unix socket has no port.
        own = _get_address(transport, "sockname")
        self._server = _intern_address(*own) if own else ("", None)
        self._state.connections.add(self)  # type: ignore[arg-type]  # typed for uvicorn's protocols
        if not self._connections.add(self):
            self._refuse(TooManyConnections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._connections.remove(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnect()
        self.resume_writing()
        # Break the reference cycle of parser and protocol: otherwise only the garbage collector
        # could free them.
        del self.parser

    def data_received(self, data: bytes) -> None:
        if self._stopped_reading:
            return
        if self._gate is not None and self._gate.is_busy and self._is_between_requests:
            if self._refuse_known(self._gate, data):
                return
            self._read = data
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        self._pending += len(data)
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # ignore the offer to upgrade
        except httptools.HttpParserError:
            self._refuse(self._error or MalformedRequest("Invalid HTTP request received."))
        # Free the data: thousands of connections may stay idle for a minute.
        self._read = b""
        if self._pending > MAX_HEAD_BYTES and not self._stopped_reading:
            self._refuse(HeadersTooLarge(MAX_HEAD_BYTES))

    @property
    def _is_between_requests(self) -> bool:
        """True if the next received byte is the first one of a request."""
        if self._exchange is not None:
            return False
        return self._phase is Phase.IDLE or (self._phase is Phase.HEAD and not self._received)

    def _refuse_known(self, gate: StartGate, data: bytes) -> bool:
        """Refuse the request in `data` without parsing it, if possible. Return True if refused.

        Not possible if the client does not read its answers, if the connection must close after
        this answer, or if the connection limit is reached. The parser then handles the request.
        """
        if self.write_paused or self._connections.ending or not self._connections.can_begin(self):
            return False
        answer = gate.refuse_known(data)
        if answer is None:
            return False
        self._connections.renew(self)
        self._enter(Phase.IDLE)
        self.transport.write(
            b"".join((STATUS_LINES[answer.status], answer.header_lines, b"\r\n", answer.body))
        )
        return True

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._pending = self._received = self._checks = 0

    def on_message_begin(self) -> None:
        if self._exchange is not None or self._stopped_reading:
            self._stop(MalformedRequest("A second request came before the first was answered."))
        if self._phase is Phase.HEAD:
            self._pending = 0  # do not count empty lines before a request
        else:
            self._enter(Phase.HEAD)
            # The request began in the same data in which the previous one ended, so the bytes of
            # its head are unknown. Set a value with which `on_headers_complete` counts them.
            self._received = MAX_HEAD_BYTES + 1
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Ignore trailers, because proxies do not check them as headers (RFC 9110, 6.5.1).
        if self._phase is Phase.HEAD:
            # Strip spaces after a value, because llhttp does not.
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._pending = 0
        parser = self.parser
        headers, self._headers = self._headers, []
        if self._received > MAX_HEAD_BYTES:
            size = len(self._url) + sum([len(name) + len(value) for name, value in headers])
            if size > MAX_HEAD_BYTES:
                self._stop(HeadersTooLarge(MAX_HEAD_BYTES))
        version = parser.get_http_version()
        try:
            fields = check_head(version, headers)
        except MalformedRequest as error:
            self._stop(error)
        method = parser.get_method().decode("ascii")
        keep_alive = version != "1.0" and parser.should_keep_alive()
        if parser.should_upgrade():
            self.framing = find_framing(headers)
            if self.framing is None:
                keep_alive = False  # the client may continue in the other protocol
            elif method == "CONNECT":
                self._stop(MalformedRequest("CONNECT: not offered here."))
        kind = Http10Exchange if version == "1.0" else Exchange
        exchange = kind(self, method, fields, keep_alive=keep_alive)
        scope = self._build_scope(method, version, exchange, headers)
        self._exchange = exchange
        self._enter(Phase.BODY)
        if self._gate is None:
            self._begin(exchange, scope)
        else:
            begin = partial(self._begin, exchange, scope)
            self._gate.pass_on(scope, exchange, begin, self._read)

    def _begin(self, exchange: Exchange, scope: dict[str, Any]) -> bool:
        """Start the application's task. Return False if the client has disconnected."""
        if exchange.disconnected:
            return False
        # Give the task a fixed name: `create_task` would format a number for each task.
        task = asyncio.Task(exchange.run(self._app, scope), loop=self._loop, name="request")
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)
        return True

    def _build_scope(
        self, method: str, version: str, exchange: Exchange, headers: list[tuple[bytes, bytes]]
    ) -> dict[str, Any]:
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        extensions: dict[str, object] = {EXCHANGE: exchange}
        if not self._connections.begin(self):
            extensions[OVER_CONNECTION_LIMIT] = True
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "method": method,
            "root_path": "",
            "path": _decode_path(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": headers,
            "state": self._app_state.copy(),
            "extensions": extensions,
        }

    def on_body(self, body: bytes) -> None:
        # Do not reset `_pending` to 0: each body byte would allow chunk extensions of any length.
        # Do not let it become negative: a large body would allow trailers of any length.
        self._pending = max(0, self._pending - _MAX_FRAMING_RATIO * len(body))
        if self._exchange is not None:
            self._exchange.feed(body)

    def on_message_complete(self) -> None:
        if self.framing is not None:
            return  # only the head is complete: another parser will read the body
        self._enter(Phase.IDLE)
        if self._exchange is not None:
            self._exchange.feed_end()
        elif self._closes_after_body:
            self._stopped_reading = True
            self.transport.close()

    # The methods below are the interface `Carrier` for the exchange.

    @property
    def ending(self) -> bool:
        return self._connections.ending

    async def drain(self) -> None:
        while self._writable is not None:
            await self._writable.wait()

    def pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()

    def on_answered(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._connections.end(self)
        if self.transport.is_closing():
            return
        if self._phase is Phase.BODY:  # skip the rest of the body
            self.resume_reading()
            self._checks = self._received = 0
        if exchange is not None and not exchange.keep_alive:
            self._hang_up()
        elif self._closes_after_answer:
            self._closes_after_answer = False
            self._linger()

    def on_failed(self, error: BaseException | None) -> None:
        exchange = self._exchange
        if exchange is None or exchange.has_sent_bytes:
            self.transport.close()
            return
        if isinstance(error, asyncio.CancelledError):
            self._send(ShuttingDown("The gateway is shutting down; try again."))
        else:
            self._send(InternalError("The server had an unexpected error."))
        exchange.keep_alive = False
        exchange.disconnect()
        self.on_answered()

    def _hang_up(self) -> None:
        """Close the connection after an answer, once the client has stopped sending or after 1 s.

        The connection is not closed at once, because closing with unread data would reset it, and
        the client could lose the answer.
        """
        if self._phase is Phase.IDLE and not self._stopped_reading:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._phase is Phase.BODY:
            self._closes_after_body = True
        else:  # the unread data is a second request, or invalid
            self._stopped_reading = True
            self._loop.call_later(_LINGER_S, self.transport.close)

    # asyncio calls the methods below for flow control.

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable = self._writable or asyncio.Event()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def shutdown(self) -> None:
        """Close the connection as soon as no request can be lost, because the server shuts down.

        If the answer has not started, it gets the header `connection: close`. If it has, or if the
        connection is idle, the client may be sending one more request. Such a request is still
        answered if it arrives within 1 s.
        """
        exchange = self._exchange
        if exchange is None:
            self._linger()
        elif exchange.status:
            self._closes_after_answer = True
        else:
            exchange.keep_alive = False

    def _linger(self) -> None:
        self._loop.call_later(_LINGER_S, self._close_behind_answer)

    def _close_behind_answer(self) -> None:
        if self._exchange is None:
            self.transport.close()
        else:
            self._exchange.keep_alive = False

    def _stop(self, error: GatewayError) -> NoReturn:
        """Stop the parser by raising an exception. `data_received` then answers with `error`."""
        self._error = error
        raise ValueError

    def _refuse(self, error: GatewayError) -> None:
        """Stop reading requests, and close the connection.

        Send the error only if the client cannot take it for the answer to another request. If a
        complete request is being answered, close the connection after the answer, without an error.
        """
        if self._stopped_reading:
            return
        self._stopped_reading = True
        exchange = self._exchange
        if self._phase is Phase.BODY:
            if exchange is not None:
                exchange.disconnect()
            if exchange is None or exchange.has_sent_bytes:
                # Send no error: the request was answered already, at least in part.
                self.transport.close()
                return
        elif exchange is not None:
            exchange.keep_alive = False
            return
        self._send(error)
        self._connections.refuse(self)
        # Close the connection after a pause, as in `_hang_up`. Data is read, but not parsed.
        self.resume_reading()
        self._loop.call_later(_LINGER_S, self.transport.close)

    def _send(self, error: GatewayError) -> None:
        status, more, body = self._build_error(error)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": secrets.token_hex(16),
            "connection": "close",
        } | more
        if (exchange := self._exchange) is not None:
            # Replace headers by those of the exchange, such as the request id that is in the logs.
            headers |= {name.decode(): value.decode("latin-1") for name, value in exchange.headers}
            body = b"" if exchange.head_only else body
        header_lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        self.transport.write(STATUS_LINES[status] + header_lines.encode("latin-1") + b"\r\n" + body)


def _get_address(transport: asyncio.Transport, end: str) -> tuple[str, int] | None:
    """Return the host and port of one end of a connection. Return None for a Unix socket.

    `end` is "peername" or "sockname".
    """
    found = transport.get_extra_info(end)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


@lru_cache(maxsize=64)
def _intern_address(host: str, port: int) -> tuple[str, int]:
    """Return the same tuple for all connections to the same address, to save memory."""
    return host, port


def _decode_path(path: str) -> str:
    """Decode a URL's path, except line feeds.

    Line feeds stay encoded because `$` in a route's pattern also matches before a final line feed.
    """
    return urllib.parse.unquote(path).replace("\n", "%0A")
