"""HTTP/1.1 protocol between clients and an ASGI application, with size limits and timeouts.

uvicorn listens, runs the event loop, and creates an `HttpProtocol` for each connection. Errors of
the HTTP layer are sent in OpenAI's format.

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
"""Function that returns the status, headers and body of the response for an error.

It is used for errors to which the HTTP layer responds itself, instead of the application.
"""


MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of a request's URL and headers.

The same maximum applies to the overhead of a chunked body, such as chunk extensions. Received bytes
count as overhead if they exceed `_MAX_FRAMING_RATIO` times the number of body bytes.
"""

MIN_BODY_BYTES_PER_PERIOD = 64 * 1024
"""Minimum bytes of a body that must arrive in each period of `ConnectionLimits.body` seconds."""

# A connection counts as slow, and may be evicted, if the body arrives more slowly than this.
_MIN_BODY_BYTES_PER_S = 16 * 1024
# Number of received bytes that a chunked body may have for each body byte. Received bytes include
# chunk sizes and chunk extensions. Received bytes above this ratio count toward `MAX_HEAD_BYTES`.
# Chunks of one body byte are allowed, because such a chunk has only 6 received bytes.
_MAX_FRAMING_RATIO = 8
# A connection does not count as slow in the first seconds of a body.
_SLOW_AFTER_S = 2

_LINGER_S = 1.0
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Phase(Enum):
    """Part of a request that a connection receives at the moment: headers, body, or nothing."""

    IDLE = 0
    """No request is being received. The last complete request may still be without a response."""
    HEAD = 1
    BODY = 2


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts of a connection, in seconds."""

    head: float = 10.0
    """Maximum time until a request's headers are complete.

    The time starts when the client connects. For a later request, it starts with the first byte.
    """
    body: float = 60.0
    """Length of the periods in which a minimum number of body bytes must arrive.

    At the end of a period, a request is refused if its body is incomplete and fewer than
    `MIN_BODY_BYTES_PER_PERIOD` bytes arrived in the period. While the gateway has paused reading,
    no minimum applies.
    """
    write: float = 60.0
    """Maximum time for which a client may read nothing while a response has unsent data."""
    idle: float = 75.0
    """Maximum time between a response and the next request.

    Clients and proxies have shorter timeouts (httpx: 5 s, load balancers: 60 s), so they close idle
    connections first. If the server closed a connection first, a request that the client is sending
    at that moment would be lost.
    """


class HttpProtocol(asyncio.Protocol):
    """Connection of a client, which may be slow or hostile.

    This class enforces all limits, because httptools has none. A connection serves one request at a
    time, without pipelining. If a second request arrives before the first request is answered, the
    second request is ignored, and the connection closes after the first response. RFC 9112 (9.3.2)
    allows this. Known clients do not use pipelining, and an attacker could use it to queue hundreds
    of requests with a few KB.
    """

    # Use slots to save memory: thousands of connections may be idle.
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
        """Create the protocol for a new connection. uvicorn passes the first four arguments.

        Args:
            config: uvicorn's configuration; unused.
            server_state: uvicorn's sets of open connections and running tasks.
            app_state: values that are copied to `state` in the ASGI scope of each request.
            _loop: the event loop; None for the running loop.
            app: the ASGI application.
            limits: timeouts of this connection.
            connections: registry of all connections of this process.
            build_error: builds the error responses that this class sends without the application.
            gate: decides whether a request starts, waits or is refused. None starts each request
                at once.
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
        """Received data, if it starts with the first byte of a request; otherwise empty.

        Set only while the data is parsed, and only if requests wait in the start queue. The gate
        uses the data to cache the head of a refused request.
        """
        self.address: str | None = None
        """The client's IP address; None on a Unix socket."""
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int | None] = "", None
        self._scheme = "http"
        self._pending = 0
        """Bytes that count toward `MAX_HEAD_BYTES`. Reset to 0 when a head or body is complete.

        While a head is received, all bytes count. While a body is received, only the received bytes
        above `_MAX_FRAMING_RATIO` times the body bytes count.
        """
        self._phase = Phase.HEAD
        self._received = 0
        """Bytes received in the current phase.

        In phase BODY, this number is set to 0 at the start of each period of
        `ConnectionLimits.body` seconds.
        """
        self._checks = 0
        """Seconds since the current phase began, counted by `check`, which is called once a second.

        In phase BODY, this number is set to 0 at the start of each period of
        `ConnectionLimits.body` seconds.
        """
        self._unsent = 0
        """Bytes in the write buffer at the last `check`."""
        self._stuck_checks = 0
        """Number of calls of `check` since `_unsent` last changed."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self.framing: tuple[bytes, bytes] | None = None
        """Header that shows where the body of an upgrade request ends; see `ParserEvents`."""
        self._exchange: Exchange | None = None
        """The request in progress; None between a complete response and the next request."""
        self._read_paused = False
        self._writable: asyncio.Event | None = None
        """Event that is set when the write buffer has space again; None while it is not full."""
        self._stopped_reading = False
        """True if all further received data is ignored."""
        self._closes_after_body = False
        """True if the connection closes when the rest of the current body has arrived.

        This happens if the request was answered before its body was complete.
        """
        self._closes_after_answer = False
        """True if the connection must close after the current response because of a shutdown."""
        self._error: GatewayError | None = None
        """Error for which `_stop` has stopped the parser; None if it was not stopped."""
        # This is an attribute, because it is read for each token and a property would be slower.
        self.write_paused = False

    @property
    def is_slow(self) -> bool:
        if self._phase is not Phase.BODY or self._checks < _SLOW_AFTER_S:
            return False
        # Count a connection as slow while reading is paused, although its client may be fast. The
        # connection still counts toward the limit, so it must be possible to evict it.
        return self._read_paused or self._received < self._checks * _MIN_BODY_BYTES_PER_S

    def abort(self) -> None:
        # Use `abort`, because `close` would wait for a client that does not read its response.
        self.transport.abort()

    def evict(self) -> None:
        self._refuse(TooManyConnections())

    def check(self) -> None:
        """Close the connection if a timeout has passed. The server calls this once a second.

        A timeout is measured by counting the calls, so a connection needs no timer of its own. Time
        in which this process is stopped or too busy for the calls does not count.
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
                # Send no error: the client could read the error as the response to its next
                # request.
                self.transport.close()
        elif self._phase is Phase.BODY and self._checks > limits.body:
            # Start another period if enough bytes arrived or if reading is paused. If the request
            # was already answered, do not start another period: refuse the rest of the body.
            wanted = self._exchange is not None
            if not wanted or (self._received < MIN_BODY_BYTES_PER_PERIOD and not self._read_paused):
                self._refuse(SlowRequest(f"The body came too slowly for {limits.body:g} s."))
            else:
                self._checks = self._received = 0
        elif self.is_slow:
            self._connections.mark_slow(self)

    def _check_writing(self) -> None:
        """Abort the connection if the client reads nothing for `limits.write` seconds.

        The size of the write buffer is compared with the size at the last call. This is done only
        while no data is added to the buffer, so a changed size proves that the client reads.
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
        # Break the reference cycle between parser and protocol. Otherwise their memory would be
        # freed only by the garbage collector.
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
            pass  # continue with HTTP/1.1: a server may ignore an upgrade offer
        except httptools.HttpParserError:
            self._refuse(self._error or MalformedRequest("Invalid HTTP request received."))
        # Free the memory of the data: thousands of connections may stay idle for a minute.
        self._read = b""
        if self._pending > MAX_HEAD_BYTES and not self._stopped_reading:
            self._refuse(HeadersTooLarge(MAX_HEAD_BYTES))

    @property
    def _is_between_requests(self) -> bool:
        """True if the next received byte is the first byte of a request."""
        if self._exchange is not None:
            return False
        return self._phase is Phase.IDLE or (self._phase is Phase.HEAD and not self._received)

    def _refuse_known(self, gate: StartGate, data: bytes) -> bool:
        """Refuse the request in `data` without parsing it, if `gate` has a response for it.

        Return True if the request was refused. Otherwise return False; the caller must then parse
        the request. Always return False if the client does not read its responses, if the server
        shuts down, or if the connection limit is reached.
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
            # The received data contained the end of the previous request and the start of this
            # request, so the size of this head is unknown. A value above the limit makes
            # `on_headers_complete` add up the sizes of the URL and the headers.
            self._received = MAX_HEAD_BYTES + 1
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Ignore trailers, which arrive after the body: proxies do not check them like headers
        # (RFC 9110, 6.5.1).
        if self._phase is Phase.HEAD:
            # Strip trailing whitespace of the value, because llhttp does not.
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
                keep_alive = False  # later data may be in the other protocol
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
        # Give the task a fixed name to save CPU time: `create_task` would format a name for each
        # task.
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
        # `_pending` has counted all received bytes. Subtract the bytes that are allowed for this
        # part of the body. Do not just set `_pending` to 0: chunk extensions could then have any
        # length. Do not let it become negative: trailers after a large body could then have any
        # length.
        self._pending = max(0, self._pending - _MAX_FRAMING_RATIO * len(body))
        if self._exchange is not None:
            self._exchange.feed(body)

    def on_message_complete(self) -> None:
        if self.framing is not None:
            return  # httptools stops after the head; a second parser will read the body
        self._enter(Phase.IDLE)
        if self._exchange is not None:
            self._exchange.feed_end()
        elif self._closes_after_body:
            self._stopped_reading = True
            self.transport.close()

    # `Exchange` calls the methods below; they implement its protocol class `Carrier`.

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
        if self._phase is Phase.BODY:  # read and ignore the rest of the body
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
        """Close the connection after a response, without losing the response.

        If the request was read completely, close at once. Otherwise, closing would reset the
        connection, and the client could lose the response. If the request's body is incomplete,
        close when the rest has arrived. If there is other unread data, such as a second request,
        close after 1 s.
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

    # asyncio calls `pause_writing` and `resume_writing` for flow control.

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable = self._writable or asyncio.Event()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def shutdown(self) -> None:
        """Close the connection without losing a request. uvicorn calls this when it shuts down.

        If a response has not started, it gets the header `connection: close`. If a response has
        started, or if the connection is idle, the client may be sending another request. The
        connection then waits 1 s for another request, and still answers it.
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
        """Abort parsing with an exception. `data_received` then calls `_refuse` with `error`."""
        self._error = error
        raise ValueError

    def _refuse(self, error: GatewayError) -> None:
        """Stop reading requests, send `error` if possible, and close the connection.

        The error is sent only if the client cannot read it as the response to another request. If a
        complete request is being answered, the connection closes after that response, and the error
        is not sent.
        """
        if self._stopped_reading:
            return
        self._stopped_reading = True
        exchange = self._exchange
        if self._phase is Phase.BODY:
            if exchange is not None:
                exchange.disconnect()
            if exchange is None or exchange.has_sent_bytes:
                # Send no error, because at least a part of the response was sent already.
                self.transport.close()
                return
        elif exchange is not None:
            exchange.keep_alive = False
            return
        self._send(error)
        self._connections.refuse(self)
        # Close the connection after 1 s: closing with unread data would reset the connection, and
        # the client could lose the error. Until then, data is read and ignored.
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
            # Headers of the exchange replace the headers above. For example, the response must have
            # the same request id as the logs.
            headers |= {name.decode(): value.decode("latin-1") for name, value in exchange.headers}
            body = b"" if exchange.head_only else body
        header_lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        self.transport.write(STATUS_LINES[status] + header_lines.encode("latin-1") + b"\r\n" + body)


def _get_address(transport: asyncio.Transport, end: str) -> tuple[str, int] | None:
    """Return the host and port of one end of a connection. Return None for a Unix socket.

    `end` is "peername" for the client's end, or "sockname" for the server's end.
    """
    found = transport.get_extra_info(end)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


@lru_cache(maxsize=64)
def _intern_address(host: str, port: int) -> tuple[str, int]:
    """Return (`host`, `port`). Equal addresses share one tuple, which saves memory."""
    return host, port


def _decode_path(path: str) -> str:
    """Return a URL's path with percent-encoded characters decoded, except line feeds.

    A line feed stays encoded, because `$` in the regular expression of a route would also match
    before a final line feed.
    """
    return urllib.parse.unquote(path).replace("\n", "%0A")
