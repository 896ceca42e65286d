"""Server-sent events that stop working when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from types import TracebackType

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientDisconnected, EngineError, GatewayError, ShuttingDown
from gateway.http_protocol import CHUNKS, ChunkWriter
from gateway.request_context import current

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# A comment alone: with an `id:`, `event:` or `retry:` line, openai-python's decoder would fail.
COMMENT = b": keep-alive\n\n"
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would otherwise collect tokens into a buffer.
    "x-accel-buffering": "no",
}


class cancel_on_disconnect:
    """Cancels the body when the client goes away and raises ClientDisconnected in its place.

    The request's body must have been read. Without this a handler that does not stream would run
    to its end for nobody. Raises ShuttingDown when it is cancelled from outside: the server does
    that to requests which outlive the shutdown grace, and would then answer in plain text.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        if error_type is not asyncio.CancelledError:
            return
        self._task.uncancel()
        if self._gone:
            raise ClientDisconnected from None
        raise ShuttingDown("The gateway is shutting down; try again.") from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


class EventStream(Response):
    """Sends frames as they come, then ``data: [DONE]``.

    The first frame is awaited before the headers, so that a refusal by the engine is a real 4xx
    or 5xx; only when it takes longer than `patience_s` do headers and comments go out first, so
    that proxies keep the line. An error after the headers is one frame with an `error` object.
    Everything runs in one task: the generator is closed where it was iterated. (sse-starlette
    costs twice as much CPU per frame, and Starlette's StreamingResponse neither waits for the
    first frame nor closes its generator.)
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        patience_s: float,
        account: AbstractAsyncContextManager[None],
    ) -> None:
        """`account` is open for as long as the frames come; it sees the error that ends them."""
        self._account = account
        self._frames = frames
        self._patience_s = patience_s
        self._started = False
        self._comments: asyncio.Task[None] | None = None
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: ChunkWriter | None = scope.get("extensions", {}).get(CHUNKS)
        # A timer and no task: the first frame is rarely late.
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience, send)
        try:
            async with (
                self._account,
                cancel_on_disconnect(receive),
                aclosing(self._frames) as frames,
            ):
                async for frame in frames:
                    if not timer.cancelled():
                        timer.cancel()
                        self._be_patient()
                    if chunks is None or not self._started:
                        await self._send(send, frame)
                    elif not chunks.write(frame):
                        await chunks.drain()
        except Exception as error:
            if not self._started:
                raise
            if (context := current.get()) is not None:
                context.error = type(error).__name__
            if isinstance(error, ClientDisconnected):
                return
            await self._send(send, _failure(error))
        finally:
            timer.cancel()
            self._be_patient()
        await self._send(send, DONE, last=True)

    def _lose_patience(self, send: Send) -> None:
        self._comments = asyncio.create_task(self._comment(send))

    def _be_patient(self) -> None:
        if self._comments is not None:
            self._comments.cancel()

    async def _comment(self, send: Send) -> None:
        while True:
            await self._send(send, COMMENT)
            await asyncio.sleep(self._patience_s)

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            status, headers = self.status_code, self.raw_headers
            await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})


def _failure(error: Exception) -> bytes:
    if not isinstance(error, GatewayError):
        log.error("stream failed", exc_info=error)
        error = EngineError("The server had an error while streaming the answer.")
    return b"data: " + error.json() + b"\n\n"
