"""Server-sent events that stop working when the client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.failures import Failure, envelope, refusal, status_of
from gateway.api.request_log import context_of, exchange_of
from gateway.errors import ClientDisconnected, InternalError, ShuttingDown
from gateway.http.exchange import Exchange

log = logging.getLogger(__name__)


class WireFormat(NamedTuple):
    """What a protocol's streams have besides the frames of an answer.

    Attributes:
        done: what comes last, after an error too.
        patience: what goes out while nothing else does.
        failure: the frame of an error after the headers.
    """

    done: bytes
    patience: bytes
    failure: Callable[[Failure], bytes]


OPENAI = WireFormat(
    done=b"data: [DONE]\n\n",
    # A comment alone: with an `id:`, `event:` or `retry:` line, openai-python's decoder would fail.
    patience=b": keep-alive\n\n",
    failure=lambda error: b"data: " + envelope(error) + b"\n\n",
)
# The same for every stream, so they are encoded once and not for each response.
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect tokens into a buffer.
    (b"x-accel-buffering", b"no"),
)

_NO_FIELDS: Mapping[bytes, bytes] = {}


class cancel_on_disconnect:
    """Cancels the body when the client goes away and raises ClientDisconnected in its place.

    Without this a handler that does not stream would run to its end for nobody. Raises ShuttingDown
    when it is cancelled from outside: the server does that to requests which outlive the shutdown
    grace.
    """

    def __init__(self, scope: Scope) -> None:
        self._client = exchange_of(scope)
        self._context = context_of(scope)
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._client.disconnected:
            raise ClientDisconnected
        # A task that waits for ASGI's message costs as much as validating the request.
        self._client.on_disconnect = self._cancel

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.on_disconnect = None
        if error_type is not asyncio.CancelledError:
            return
        self._task.uncancel()
        if self._gone:
            raise ClientDisconnected from None
        raise ShuttingDown("The gateway is shutting down; try again.") from None

    def _cancel(self) -> None:
        self._gone = True
        if self._context.left_at is None:
            self._context.left_at = time.perf_counter()
        self._task.cancel()


class EventBody:
    """The body of an `EventStream`: the headers pass the middlewares, frames do not.

    Several tasks may drain it: nothing is waited for between taking bytes and writing them.
    """

    def __init__(
        self, head: Message, exchange: Exchange, send: Send, patience_s: float, patience: bytes
    ) -> None:
        self._patience = patience
        self._head: Message | None = head
        self._send = send
        self._patience_s = patience_s
        self._exchange = exchange
        self._waiting = b""
        self._comments: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._patient = False

    @property
    def started(self) -> bool:
        return self._head is None

    def expect(self) -> None:
        """From now on the first frame is late after `patience_s`; called again, changes nothing."""
        if self._timer is None and not self._patient:
            # No task: the first frame is rarely late.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._patience_s, self._lose_patience)

    def write(self, data: bytes) -> bool:
        """False when `drain` should be awaited before the next one."""
        self._waiting += data
        return False

    async def drain(self, by: float | None = None) -> None:
        """As `Exchange.drain`."""
        if self._waiting:
            self.be_patient()
            await self._start()
            self._exchange.write(self._taken())
            # From here on a token costs nothing of its own here.
            self.write = self._exchange.write_chunk  # type: ignore[method-assign]
        await self._exchange.drain(by)

    async def end(self, data: bytes) -> None:
        await self._start()
        self._exchange.end(self._taken() + data)

    def be_patient(self) -> None:
        """No comments any more."""
        self._patient = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comments is not None:
            self._comments.cancel()

    def _lose_patience(self) -> None:
        self._comments = asyncio.create_task(self._comment())

    async def _comment(self) -> None:
        await self._start()
        while True:
            self._exchange.write(self._patience)
            await self._exchange.drain()
            await asyncio.sleep(self._patience_s)

    async def _start(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head)

    def _taken(self) -> bytes:
        taken, self._waiting = self._waiting, b""
        return taken


class EventStream(Response):
    """Sends frames as they are written, then what ends a stream in its protocol.

    The first frame is awaited before the headers, so that a refusal by the engine is a real 4xx
    or 5xx; only when it takes longer than `patience_s` after `EventBody.expect` do headers and
    comments go out first, so that proxies keep the line. An error after the headers is one frame.
    Everything runs in one task. (sse-starlette costs twice as much CPU per frame, and Starlette's
    StreamingResponse does not wait for the first frame.)
    """

    def __init__(
        self,
        write: Callable[[EventBody], Awaitable[None]],
        headers: Mapping[str, str],
        patience_s: float,
        account: AbstractAsyncContextManager[None],
        wire: WireFormat,
    ) -> None:
        """`account` is open for as long as `write` runs; it sees the error that ends it."""
        self._account = account
        self._write = write
        self._wire = wire
        self._patience_s = patience_s
        self.status_code = 200
        self.background = None
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.raw_headers = [*EVENT_HEADERS, *own]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        exchange = exchange_of(scope)
        # Nobody asks for what the client has said while a stream lasts.
        scope["headers"], exchange.fields = (), _NO_FIELDS
        body = EventBody(head, exchange, send, self._patience_s, self._wire.patience)
        del head  # which would be kept until the last
        end = self._wire.done
        try:
            async with self._account, cancel_on_disconnect(scope):
                await self._write(body)
        except Exception as error:
            if not body.started:
                raise
            context = context_of(scope)
            context.error, context.late_status = type(error), status_of(error)
            if isinstance(error, Failure):
                context.refusal = refusal(error)
            if isinstance(error, ClientDisconnected):
                return
            end = self._wire.failure(told(error)) + end
        finally:
            body.be_patient()
        await body.end(end)


def told(error: Exception) -> Failure:
    """What a client that has half an answer is told of its end."""
    if isinstance(error, Failure):
        return error
    log.error("stream failed", exc_info=error)
    return InternalError("The server had an error while streaming the answer.")
