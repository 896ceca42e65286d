"""A request on its way in: read, parsed and made a prompt, within bounds on memory and in turn.

What a large body takes (its bytes, their values, the prompt, its tokens) is many times its size. So
such bodies wait for their tenant's turn before they are read: until then the system keeps them, and
the client cannot send. What is done with them is done off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TypeVar

from fastapi import Request

from gateway.api.body import LARGE_BODY, read_body
from gateway.api.request_log import service_of
from gateway.api.sse import cancel_on_disconnect
from gateway.config.tenants import Tenant
from gateway.errors import ConversationTooLarge

T = TypeVar("T")

# The parts of a body decide, not its bytes alone: a tool or a message costs up to 40 us, any other
# value up to 1.5 us (tests/gateway/api/test_loop_turns.py).
_MAX_INLINE_PARTS = 4096
_PARTS_AN_OBJECT = 32
_MAX_INLINE_HISTORY_BYTES = LARGE_BODY // 8


class Intake:
    """Use it with `async with` from before the body is read until the prompt is token ids.

    When the client leaves meanwhile, what runs inside is cancelled, and ClientDisconnected raised.
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
        self._room = 0

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
        """What `parse` makes of the body. Raises what it and `read_body` raise, and Overloaded."""
        body = [await read_body(self._request, self._service.settings.max_body_bytes, self._wait)]
        self._size = len(body[0])
        if _count_parts(body[0]) > _MAX_INLINE_PARTS:
            self.offload()
        # Nothing here keeps the bytes.
        return await self.work(lambda: parse(body.pop()))

    async def work(self, work: Callable[[], T]) -> T:
        """Do work that takes time by the size of the body, in a thread if that may be long."""
        if not self._offloads and self._size <= LARGE_BODY:
            return work()
        # Less is done here, and more goes to a thread where a page would wait for a book.
        chars = max(self._size, LARGE_BODY)
        return await self._service.prompts.threads.run(self._tenant, chars, work)

    def offload(self) -> None:
        """Run all further work in a thread, such as work that is repeated many times."""
        self._offloads = True

    async def make_room(self, size: int) -> None:
        """For a turn to have `size` bytes here that did not come with the request.

        A smaller turn of that kind is given up for it: nobody waits for a second one while holding
        a first. Raises ConversationTooLarge for more than a body may have, and Overloaded.
        """
        most = self._service.settings.max_body_bytes
        if size > most:
            raise ConversationTooLarge(
                f"The conversation has {size} bytes before this request; allowed: {most}."
            )
        self._size = max(self._size, size)
        if size > _MAX_INLINE_HISTORY_BYTES:
            self.offload()
        if size > max(LARGE_BODY, self._room):
            if self._history is not None:
                permit, self._history = self._history, None
                await permit.__aexit__(None, None, None)
            turn = self._service.histories.permit(self._tenant, self._priority, cost=size)
            await turn.__aenter__()
            self._history, self._room = turn, size

    async def _wait(self, size: int) -> None:
        """For a turn to have a body of `size` bytes here."""
        turn = self._service.bodies.permit(self._tenant, self._priority, cost=size)
        await turn.__aenter__()
        self._body = turn


def _count_parts(body: bytes) -> int:
    """Return about how many values a body has, with objects as many times as they cost.

    Most control tokens begin with `<`. If a template replaces words, each one in a text costs
    0.5 us.
    """
    others = body.count(b"[") + body.count(b",") + body.count(b"<")
    return _PARTS_AN_OBJECT * body.count(b"{") + others
