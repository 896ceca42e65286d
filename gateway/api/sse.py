"""Server-sent events, with cancellation when the client disconnects.

See decisions 013 and 038 in docs/decisions.
"""

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

from gateway.api.failures import Failure, build_envelope, get_refusal_reason, status_of
from gateway.api.request_log import context_of, exchange_of
from gateway.errors import ClientDisconnected, InternalError, ShuttingDown
from gateway.http.exchange import Exchange

log = logging.getLogger(__name__)


class WireFormat(NamedTuple):
    """SSE frames of a protocol that are not part of an answer.

    Attributes:
        done: the last frame of a stream, also after an error; b"" for no such frame.
        keep_alive: the frame to send while there is nothing else to send.
        failure: builds the frame for an error that occurs after the headers were sent.
    """

    done: bytes
    keep_alive: bytes
    failure: Callable[[Failure], bytes]


OPENAI = WireFormat(
    done=b"data: [DONE]\n\n",
    # Send a comment: openai-python's decoder fails on an `id:`, `event:` or `retry:` line alone.
    keep_alive=b": keep-alive\n\n",
    failure=lambda error: b"data: " + build_envelope(error) + b"\n\n",
)
# The headers of every stream, encoded only once.
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # This header stops nginx from buffering tokens.
    (b"x-accel-buffering", b"no"),
)

_NO_FIELDS: Mapping[bytes, bytes] = {}


class cancel_on_disconnect:
    """Context manager that cancels the code inside when the client disconnects.

    The context manager then raises ClientDisconnected. Without it, a handler that does not stream
    would run to its end although no client waits for the response. If the task is cancelled for
    another reason, the context manager raises ShuttingDown: the server cancels requests that exceed
    the shutdown grace period.
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
        # Use a callback: a task that waits for ASGI's disconnect message costs as much CPU as
        # the validation of a request.
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
    """The body of an `EventStream`, to which the protocol's encoder writes frames.

    Headers are sent through the ASGI middlewares. Frames are written directly to the connection.
    Several tasks may call `drain` at the same time. `drain` takes and writes the unsent bytes
    without an `await` in between, so the frames stay in order.
    """

    def __init__(
        self, head: Message, exchange: Exchange, send: Send, keep_alive_s: float, patience: bytes
    ) -> None:
        self._keep_alive = patience
        self._head: Message | None = head
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._exchange = exchange
        self._unsent = b""
        self._comments: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    @property
    def has_started(self) -> bool:
        return self._head is None

    def start_keep_alive(self) -> None:
        """Send keep-alive frames if the first frame takes longer than `keep_alive_s` from now.

        Further calls have no effect.
        """
        if self._timer is None and not self._is_stopped:
            # Use a timer, which is cheaper than a task: the first frame is rarely late.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._keep_alive_s, self._start_comments)

    def write(self, data: bytes) -> bool:
        """Write frames. Return False if `drain` must be awaited before more frames are written."""
        self._unsent += data
        return False

    async def drain(self, by: float | None = None) -> None:
        """Send the unsent frames, then wait like `Exchange.drain`."""
        if self._unsent:
            self.stop_keep_alive()
            await self._start()
            self._exchange.write(self._take_waiting())
            # Replace this object's `write` by `Exchange.write_chunk`. Later frames then go directly
            # to the connection, without the buffer `_unsent`.
            self.write = self._exchange.write_chunk  # type: ignore[method-assign]
        await self._exchange.drain(by)

    async def end(self, data: bytes) -> None:
        await self._start()
        self._exchange.end(self._take_waiting() + data)

    def stop_keep_alive(self) -> None:
        """Stop sending keep-alive frames."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comments is not None:
            self._comments.cancel()

    def _start_comments(self) -> None:
        self._comments = asyncio.create_task(self._send_comments())

    async def _send_comments(self) -> None:
        await self._start()
        while True:
            self._exchange.write(self._keep_alive)
            await self._exchange.drain()
            await asyncio.sleep(self._keep_alive_s)

    async def _start(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head)

    def _take_waiting(self) -> bytes:
        taken, self._unsent = self._unsent, b""
        return taken


class EventStream(Response):
    """A response that streams frames as they are written, then the protocol's last frame.

    The headers are sent together with the first frame. An error before the first frame becomes a
    response with HTTP status 4xx or 5xx. An error after the headers becomes a frame of the stream.

    Proxies may close a silent connection. So headers and keep-alive frames are sent if there is no
    first frame `keep_alive_s` seconds after the call of `EventBody.start_keep_alive`.

    This class replaces two libraries. sse-starlette costs twice as much CPU per frame. Starlette's
    StreamingResponse sends the headers without waiting for the first frame.
    """

    def __init__(
        self,
        write: Callable[[EventBody], Awaitable[None]],
        headers: Mapping[str, str],
        keep_alive_s: float,
        account: AbstractAsyncContextManager[None],
        wire: WireFormat,
    ) -> None:
        """Create the response.

        Args:
            write: writes the frames.
            headers: additional response headers.
            keep_alive_s: seconds of silence before a keep-alive frame.
            account: a context manager in which `write` runs. An error of `write` is passed to
                `__aexit__`.
            wire: the protocol's frames for errors, keep-alive and the end of the stream.
        """
        self._account = account
        self._write = write
        self._wire = wire
        self._keep_alive_s = keep_alive_s
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
        # Free the request's headers: nothing reads them during the stream.
        scope["headers"], exchange.fields = (), _NO_FIELDS
        body = EventBody(head, exchange, send, self._keep_alive_s, self._wire.keep_alive)
        del head  # free the message: this variable would exist until the end of the stream
        end = self._wire.done
        try:
            async with self._account, cancel_on_disconnect(scope):
                await self._write(body)
        except Exception as error:
            if not body.has_started:
                raise
            context = context_of(scope)
            context.error, context.late_status = type(error), status_of(error)
            if isinstance(error, Failure):
                context.refusal = get_refusal_reason(error)
            if isinstance(error, ClientDisconnected):
                return
            end = self._wire.failure(to_failure(error)) + end
        finally:
            body.stop_keep_alive()
        await body.end(end)


def to_failure(error: Exception) -> Failure:
    """Return the error to report in a stream.

    An error that is no `Failure` is logged, and InternalError is returned instead.
    """
    if isinstance(error, Failure):
        return error
    log.error("stream failed", exc_info=error)
    return InternalError("The server had an error while streaming the answer.")
