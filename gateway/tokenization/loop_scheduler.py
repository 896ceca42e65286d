"""Scheduling of short pieces of work (steps) on the event loop, in round-robin order of tenants."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class LoopScheduler:
    """Round-robin scheduler of short pieces of work (steps), by tenant. Belongs to one event loop.

    Only one step runs per iteration of the event loop. A long text is encoded in blocks, one block
    per step. Ten long texts at the same time therefore delay running streams no more than one long
    text does. A short text waits for at most one block of each other tenant.
    """

    def __init__(self) -> None:
        # Waiting steps by tenant. The first tenant is the tenant whose last step was the longest
        # ago.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False

    async def wait_step(self, tenant: str) -> None:
        """Wait for permission to run one step in the current iteration of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._grant_next, loop)
            return
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        await turn

    def _grant_next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():  # otherwise the request was cancelled
                turn.set_result(None)
                loop.call_soon(self._grant_next, loop)
                return
        self._is_taken = False
