"""HTTP/1.1 for an ASGI application, with limits on size and time, and errors in OpenAI's envelope.

uvicorn listens, starts and ends; this is the protocol that it makes for each connection.
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
from gateway.http.errors import (
    HeadersTooLarge,
    MalformedRequest,
    SlowRequest,
    TooManyConnections,
)
from gateway.http.exchange import EXCHANGE, NO_ROOM, STATUS_LINES, App, Exchange, OldExchange
from gateway.http.head import check_head, framing
from gateway.http.parser import RequestParser
from gateway.http.start_gate import StartGate

Answer = Callable[[GatewayError], tuple[int, dict[str, str], bytes]]
"""Gives the status, headers and body of what a connection answers itself."""


MAX_HEAD = 64 * 1024
"""Bytes of a request's URL and headers, or of what a chunked body has beside itself."""

SLOWEST_BODY = 64 * 1024
"""Bytes that a body must bring in the time that it has, unless it ends."""

_BRISK_BODY = 16 * 1024
# A chunked body may come in so many times its own bytes: those of chunks of one byte are six times.
_MOST_FRAMING = 8
# Seconds after which a body that brings fewer of those in each of them lags.
_BRISK_AFTER = 2

_LINGER_S = 1.0
_ASGI = {"version": "3.0", "spec_version": "2.3"}


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
    idle: float = 75.0
    """From an answer to the next request. Longer than clients and proxies keep idle connections
    (httpx 5 s, load balancers 60 s): whoever closes first must not be the server, or a request that
    is just being sent is lost."""


class HttpProtocol(asyncio.Protocol):
    """A connection whose client may be slow, greedy or hostile.

    httptools sets no limits by itself. One request at a time: what comes behind a request that is
    not answered yet is not read, and the connection closes after that answer, as RFC 9112 allows
    (9.3.2). No client of ours pipelines, and an attacker would have hundreds of requests queued
    with a few kilobytes.
    """

    # In place of a dict: many connections only wait.
    __slots__ = (
        "_all",
        "_answer_to",
        "_app",
        "_app_state",
        "_client",
        "_error",
        "_exchange",
        "_gate",
        "_headers",
        "_heard",
        "_last",
        "_limits",
        "_loop",
        "_over",
        "_pending",
        "_phase",
        "_read",
        "_read_paused",
        "_refused",
        "_scheme",
        "_server",
        "_state",
        "_stuck",
        "_unsent",
        "_url",
        "_waited",
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
        answer: Answer,
        gate: StartGate | None = None,
    ) -> None:
        """What uvicorn gives, and `connections`, which are all of this process.

        `answer` gives the status, headers and body of what this connection answers itself. With
        a `gate`, requests begin when that lets them.
        """
        self.parser: httptools.HttpRequestParser = RequestParser(self)
        self._loop = _loop or asyncio.get_running_loop()
        self._state = server_state
        self._app_state = app_state
        self._app = app
        self._limits = limits
        self._all = connections
        self._answer_to = answer
        self._gate = gate
        self._read = b""
        """All bytes since a request's first one, while `gate` may want to know its head."""
        self.address: str | None = None
        """The client's IP address; None on a socket that has none."""
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int | None] = "", None
        self._scheme = "http"
        self._pending = 0
        """Bytes of the reads since something was complete, without the read that held its end; of a
        body's, what goes beyond `_MOST_FRAMING` times the body in them."""
        self._phase = Phase.HEAD
        self._heard = 0
        """Bytes in this phase; of a body, since its patience was last renewed."""
        self._waited = 0
        """Calls of `check` in this phase, or since that."""
        self._unsent = 0
        self._stuck = 0
        """Calls of `check` since `_unsent`, the bytes that wait for the client, last changed."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self.framing: tuple[bytes, bytes] | None = None
        """See `RequestParser`."""
        self._exchange: Exchange | None = None
        """Under way; None between a whole answer and the next request."""
        self._read_paused = False
        self._writable: asyncio.Event | None = None
        """While the client has as much waiting for it as may."""
        self._refused = False
        """Whether nothing more is read."""
        self._over = False
        """Whether it closes behind what is left of an answered request's body."""
        self._last = False
        """Whether the server ends, and this connection after the answer that is under way."""
        self._error: GatewayError | None = None
        """What stopped the parser, where that was us."""
        # Asked for each token: no property.
        self.write_paused = False

    @property
    def lags(self) -> bool:
        if self._phase is not Phase.BODY or self._waited < _BRISK_AFTER:
            return False
        # Whoever is not read from cannot be slow, but holds its place with no work for it.
        return self._read_paused or self._heard < self._waited * _BRISK_BODY

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
        if self._refused or (self._phase is Phase.IDLE and self._exchange is not None):
            return
        self._waited += 1
        limits = self._limits
        if self._phase is Phase.IDLE:
            if self._waited > limits.idle:
                self.transport.close()
        elif self._phase is Phase.HEAD and self._waited > limits.head:
            if self._heard:
                self._refuse(SlowRequest(f"The headers took more than {limits.head:g} s."))
            else:
                self.transport.close()  # an answer to nothing could be taken for the next one's
        elif self._phase is Phase.BODY and self._waited > limits.body:
            # Whoever is not read from cannot be slow; what nobody wants has that time once.
            wanted = self._exchange is not None
            if not wanted or (self._heard < SLOWEST_BODY and not self._read_paused):
                self._refuse(SlowRequest(f"The body came too slowly for {limits.body:g} s."))
            else:
                self._waited = self._heard = 0
        elif self.lags:
            self._all.lag(self)

    def _check_writing(self) -> None:
        """Only while nothing is added to what waits, so that any change is the client's doing."""
        left = 0
        if self.write_paused or self.transport.is_closing():
            left = self.transport.get_write_buffer_size()
        if left != self._unsent or not left:
            self._unsent, self._stuck = left, 0
            return
        self._stuck += 1
        if self._stuck > self._limits.write:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._client = _address(transport, "peername")
        self.address = self._client and self._client[0]
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        # What comes by way of a path has no port.
        own = _address(transport, "sockname")
        self._server = _shared(*own) if own else ("", None)
        self._state.connections.add(self)  # type: ignore[arg-type]  # which are its own protocols
        if not self._all.add(self):
            self._refuse(TooManyConnections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._all.remove(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnect()
        self.resume_writing()
        # They know each other: together they would wait for the garbage collector.
        del self.parser

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._read = b""
        if self._gate is not None and self._gate.is_busy and self._is_between_requests:
            if self._refuse_known(self._gate, data):
                return
            self._read = data
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        self._pending += len(data)
        self._heard += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an offer, which is not taken
        except httptools.HttpParserError:
            self._refuse(self._error or MalformedRequest("Invalid HTTP request received."))
        if self._pending > MAX_HEAD and not self._refused:
            self._refuse(HeadersTooLarge(MAX_HEAD))

    @property
    def _is_between_requests(self) -> bool:
        """Return True if the next byte is the first of a request."""
        if self._exchange is not None:
            return False
        return self._phase is Phase.IDLE or (self._phase is Phase.HEAD and not self._heard)

    def _refuse_known(self, gate: StartGate, data: bytes) -> bool:
        """Refuse the request in `data`, if it is to be refused, without parsing it.

        A client that takes no answers must not be given more, and an answer that is the last of its
        connection says so: both are for the parser's way.
        """
        if self.write_paused or self._all.ending or not self._all.has_room(self):
            return False
        answer = gate.refuse_known(data)
        if answer is None:
            return False
        self._all.renew(self)
        self._enter(Phase.IDLE)
        self.transport.write(
            b"".join((STATUS_LINES[answer.status], answer.lines, b"\r\n", answer.body))
        )
        return True

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._pending = self._heard = self._waited = 0

    def on_message_begin(self) -> None:
        if self._exchange is not None or self._refused:
            self._stop(MalformedRequest("A second request came before the first was answered."))
        if self._phase is Phase.HEAD:
            self._pending = 0  # empty lines before a request
        else:
            self._enter(Phase.HEAD)
            # It began in the read that ended the one before: how long it is must be counted.
            self._heard = MAX_HEAD + 1
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers: whoever checked those has not seen these (RFC 9110, 6.5.1).
        if self._phase is Phase.HEAD:
            # llhttp leaves the spaces behind a value on it.
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._pending = 0
        parser = self.parser
        headers, self._headers = self._headers, []
        if self._heard > MAX_HEAD:
            size = len(self._url) + sum([len(name) + len(value) for name, value in headers])
            if size > MAX_HEAD:
                self._stop(HeadersTooLarge(MAX_HEAD))
        version = parser.get_http_version()
        try:
            fields = check_head(version, headers)
        except MalformedRequest as error:
            self._stop(error)
        method = parser.get_method().decode("ascii")
        keep_alive = version != "1.0" and parser.should_keep_alive()
        if parser.should_upgrade():
            self.framing = framing(headers)
            if self.framing is None:
                keep_alive = False  # the client may go on in the other protocol
            elif method == "CONNECT":
                self._stop(MalformedRequest("CONNECT: not offered here."))
        kind = OldExchange if version == "1.0" else Exchange
        exchange = kind(self, method, fields, keep_alive=keep_alive)
        scope = self._scope(method, version, exchange, headers)
        self._exchange = exchange
        self._enter(Phase.BODY)
        if self._gate is None:
            self._begin(exchange, scope)
        else:
            begin = partial(self._begin, exchange, scope)
            self._gate.pass_on(scope, exchange, begin, self._read)

    def _begin(self, exchange: Exchange, scope: dict[str, Any]) -> bool:
        """Have the application answer; return False if the client has left."""
        if exchange.disconnected:
            return False
        # With one name for all: the loop's own method makes each a number that nobody reads.
        task = asyncio.Task(exchange.run(self._app, scope), loop=self._loop, name="request")
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)
        return True

    def _scope(
        self, method: str, version: str, exchange: Exchange, headers: list[tuple[bytes, bytes]]
    ) -> dict[str, Any]:
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        extensions: dict[str, object] = {EXCHANGE: exchange}
        if not self._all.begin(self):
            extensions[NO_ROOM] = True
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "method": method,
            "root_path": "",
            "path": _decoded(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": headers,
            "state": self._app_state.copy(),
            "extensions": extensions,
        }

    def on_body(self, body: bytes) -> None:
        # Not 0: a byte of body would make up for any length of its chunk's extensions. Nor less: a
        # large body would for trailers of any length.
        self._pending = max(0, self._pending - _MOST_FRAMING * len(body))
        if self._exchange is not None:
            self._exchange.feed(body)

    def on_message_complete(self) -> None:
        if self.framing is not None:
            return  # the body is still to come, from another parser
        self._enter(Phase.IDLE)
        if self._exchange is not None:
            self._exchange.feed_end()
        elif self._over:
            self._refused = True
            self.transport.close()

    # What an exchange asks.

    @property
    def ending(self) -> bool:
        return self._all.ending

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

    def answered(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._all.end(self)
        if self.transport.is_closing():
            return
        if self._phase is Phase.BODY:  # what is left of it is passed over
            self.resume_reading()
            self._waited = self._heard = 0
        if exchange is not None and not exchange.keep_alive:
            self._hang_up()
        elif self._last:
            self._last = False
            self._linger()

    def failed(self, error: BaseException | None) -> None:
        exchange = self._exchange
        if exchange is None or exchange.told:
            self.transport.close()
            return
        if isinstance(error, asyncio.CancelledError):
            self._send(ShuttingDown("The gateway is shutting down; try again."))
        else:
            self._send(InternalError("The server had an unexpected error."))
        exchange.keep_alive = False
        exchange.disconnect()
        self.answered()

    def _hang_up(self) -> None:
        """Closes behind an answer, once nothing more comes, or not for long: a connection that is
        closed with data unread is reset, and the answer lost with it."""
        if self._phase is Phase.IDLE and not self._refused:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._phase is Phase.BODY:
            self._over = True
        else:  # a second request, or what looks like one
            self._refused = True
            self._loop.call_later(_LINGER_S, self.transport.close)

    # What asyncio says of the transport.

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable = self._writable or asyncio.Event()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def shutdown(self) -> None:
        """The server ends. Answers that begin now say that they are their connection's last.

        Those that began before could not, so the client may send one more request the moment it
        has one; and on an idle connection a request may be on its way. Closing would lose it.
        """
        exchange = self._exchange
        if exchange is None:
            self._linger()
        elif exchange.status:
            self._last = True
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
        """Ends the parser, whose caller then refuses."""
        self._error = error
        raise ValueError

    def _refuse(self, error: GatewayError) -> None:
        """Reads no more; answers, where that cannot be taken for another request's answer."""
        if self._refused:
            return
        self._refused = True
        exchange = self._exchange
        if self._phase is Phase.BODY:
            if exchange is not None:
                exchange.disconnect()
            if exchange is None or exchange.told:
                self.transport.close()  # it has an answer, or a part of one
                return
        elif exchange is not None:
            exchange.keep_alive = False
            return
        self._send(error)
        self._all.refuse(self)
        # As in `_hang_up`; of what comes nothing is even parsed.
        self.resume_reading()
        self._loop.call_later(_LINGER_S, self.transport.close)

    def _send(self, error: GatewayError) -> None:
        status, more, body = self._answer_to(error)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": secrets.token_hex(16),
            "connection": "close",
        } | more
        if (exchange := self._exchange) is not None:
            # The id by which the logs know the request.
            headers |= {name.decode(): value.decode("latin-1") for name, value in exchange.headers}
            body = b"" if exchange.head_only else body
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        self.transport.write(STATUS_LINES[status] + lines.encode("latin-1") + b"\r\n" + body)


def _address(transport: asyncio.Transport, end: str) -> tuple[str, int] | None:
    """Host and port; None on a socket that has none."""
    found = transport.get_extra_info(end)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


@lru_cache(maxsize=64)
def _shared(host: str, port: int) -> tuple[str, int]:
    """One for all connections that came by the same address."""
    return host, port


def _decoded(path: str) -> str:
    """All but a line's end: a route's expression takes one behind its own end, too."""
    return urllib.parse.unquote(path).replace("\n", "%0A")
