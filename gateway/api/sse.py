"""Server-sent events that stop working when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientDisconnected, EngineError, GatewayError, ShuttingDown

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


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the body when the client goes away and raises ClientDisconnected in its place.

    The request's body must have been read. Without this a handler that does not stream would run
    to its end for nobody. Raises ShuttingDown when it is cancelled from outside: the server does
    that to requests which outlive the shutdown grace, and would then answer in plain text.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        task.uncancel()
        if gone:
            raise ClientDisconnected from None
        raise ShuttingDown("The gateway is shutting down; try again.") from None
    finally:
        watcher.cancel()


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
        self, frames: AsyncGenerator[bytes, None], headers: Mapping[str, str], patience_s: float
    ) -> None:
        self._frames = frames
        self._patience_s = patience_s
        self._started = False
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        waiting = asyncio.create_task(self._keep_alive(send))
        try:
            async with cancel_on_disconnect(receive), aclosing(self._frames) as frames:
                async for frame in frames:
                    if not waiting.done():
                        waiting.cancel()
                    await self._send(send, frame)
        except Exception as error:
            if not self._started:
                raise
            if isinstance(error, ClientDisconnected):
                return
            await self._send(send, _failure(error))
        finally:
            waiting.cancel()
        await self._send(send, DONE, last=True)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._patience_s)
            await self._send(send, COMMENT)

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
