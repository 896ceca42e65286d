"""Reading and parsing of a request within memory budgets that tenants share fairly.

A large body needs many times its size in memory (bytes, parsed values, prompt, tokens). So the
gateway waits for a share of the budget before it reads the body. Until then, TCP backpressure stops
the client. Large bodies are processed in a thread instead of on the event loop.

See decision 040 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TypeVar

from fastapi import Request

from gateway.api.body import LARGE_BODY_BYTES, read_body
from gateway.api.request_log import service_of
from gateway.api.sse import cancel_on_disconnect
from gateway.config.tenants import Tenant
from gateway.errors import ConversationTooLarge

T = TypeVar("T")

# A body with more values than this is parsed in a thread, not on the event loop. The time of
# parsing depends on the number of values, not on the size in bytes. An object counts as several
# values: parsing a tool or a message takes up to 40 us, parsing any other value up to 1.5 us
# (tests/gateway/api/test_loop_turns.py).
_MAX_INLINE_PARTS = 4096
_PARTS_PER_OBJECT = 32
_MAX_INLINE_HISTORY_BYTES = LARGE_BODY_BYTES // 8


class Intake:
    """Reader of one request's body that holds the request's shares of the memory budgets.

    Use as a context manager: enter it before the body is read, and leave it after the prompt is
    tokenized. If the client disconnects meanwhile, the request's task is cancelled and the context
    manager raises ClientDisconnected.
    """

    def __init__(self, request: Request, tenant: Tenant | None) -> None:
        self._service = service_of(request.scope)
        self._request = request
        self._client = cancel_on_disconnect(request.scope)
        self._tenant = tenant.name if tenant else ""
        self._priority = tenant.priority if tenant else 0
        self._body: AbstractAsyncContextManager[object] | None = None
        self._history: AbstractAsyncContextManager[object] | None = None
        self._size = 0
        self._offloads = False
        self._history_bytes = 0

    async def __aenter__(self) -> Intake:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for permit in (self._body, self._history):
            if permit is not None:
                await permit.__aexit__(None, None, None)
        await self._client.__aexit__(error_type, error, traceback)

    async def read(self, parse: Callable[[bytes], T]) -> T:
        """Read the body and return the result of `parse`.

        Raise the errors of `parse` and `read_body`, and Overloaded if the budget is used up.
        """
        body = [
            await read_body(
                self._request, self._service.settings.max_body_bytes, self._reserve_body
            )
        ]
        self._size = len(body[0])
        if _count_parts(body[0]) > _MAX_INLINE_PARTS:
            self.offload()
        # `pop` drops the reference, so the bytes are freed as early as possible.
        return await self.work(lambda: parse(body.pop()))

    async def work(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Use a thread for a large body or after `offload`."""
        if not self._offloads and self._size <= LARGE_BODY_BYTES:
            return work()
        # Tenants share the threads fairly, by the cost `chars` of their work. A small body is
        # processed in a thread only if the work takes long. So a small body costs as much as one of
        # `LARGE_BODY_BYTES` bytes.
        chars = max(self._size, LARGE_BODY_BYTES)
        return await self._service.prompts.threads.run(self._tenant, chars, work)

    def offload(self) -> None:
        """Make all later calls of `work` use a thread.

        Call this method if the body is small but the work on it takes long in total. An example is
        a caller that calls `work` many times.
        """
        self._offloads = True

    async def reserve_history(self, size: int) -> None:
        """Wait for a share of the history budget, for `size` bytes of a stored conversation.

        A smaller share from an earlier call is released first: waiting for a second share while
        holding one could deadlock. Raise ConversationTooLarge if `size` exceeds `max_body_bytes`,
        and Overloaded if the wait is too long.
        """
        max_bytes = self._service.settings.max_body_bytes
        if size > max_bytes:
            raise ConversationTooLarge(
                f"The conversation has {size} bytes before this request; allowed: {max_bytes}."
            )
        self._size = max(self._size, size)
        if size > _MAX_INLINE_HISTORY_BYTES:
            self.offload()
        if size > max(LARGE_BODY_BYTES, self._history_bytes):
            if self._history is not None:
                permit, self._history = self._history, None
                await permit.__aexit__(None, None, None)
            share = self._service.history_budget.permit(self._tenant, self._priority, cost=size)
            await share.__aenter__()
            self._history, self._history_bytes = share, size

    async def _reserve_body(self, size: int) -> None:
        """Wait for a share of the body budget, for a body of `size` bytes."""
        share = self._service.body_budget.permit(self._tenant, self._priority, cost=size)
        await share.__aenter__()
        self._body = share


def _count_parts(body: bytes) -> int:
    """Estimate the number of values in a JSON body. An object counts as `_PARTS_PER_OBJECT` values.

    Each `<` counts as a value, too, because most control tokens begin with `<`. A control token in
    a message can cost 0.5 us, if the chat template replaces words in the message.
    """
    others = body.count(b"[") + body.count(b",") + body.count(b"<")
    return _PARTS_PER_OBJECT * body.count(b"{") + others
