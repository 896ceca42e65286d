"""What a console is shown by this worker: its own part, and the state of all workers."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from gateway.api.request_log import may_be_an_id
from gateway.api.siblings import Said, ask
from gateway.console.feed import Feed
from gateway.console.merge import merge_parts
from gateway.console.part import Part, PartBuilder, now
from gateway.console.shared import SharedResult
from gateway.errors import Overloaded
from gateway.http.workers import Worker
from gateway.monitor.watched import RequestSummary, WatchedRequest
from gateway.service import Service

INTERNAL = "/internal/console"
_MOST_READERS = 16
_AT_ONCE = 4
_MOST_WAITING = 16
_SILENT = "Another worker of this gateway does not answer now; try again."


class Console:
    """Belongs to one event loop. Nothing is worked out while nobody looks."""

    def __init__(self, service: Service, worker: Worker | None) -> None:
        self._service = service
        self._siblings = [] if worker is None else worker.siblings
        parts = PartBuilder(service, 0 if worker is None else worker.index)
        self._whole = partial(parts.make, complete=True)
        self.part = SharedResult[Part](partial(parts.make, complete=False))
        """For the other workers."""
        self.feed = Feed(self._state)
        self._readers = 0
        # Whoever asks for what is not there has all workers asked: one tenant does so once at a
        # time, and all together a few times. Few wait for that, as anybody can ask faster.
        self._asking = asyncio.Semaphore(_AT_ONCE)
        self._asks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting = Counter[str]()

    def enter(self) -> None:
        """One who follows. Raises Overloaded; else `leave` must follow."""
        if self._readers >= _MOST_READERS:
            raise Overloaded(f"{_MOST_READERS} consoles follow this gateway's events already.")
        self._readers += 1

    def leave(self) -> None:
        self._readers -= 1

    def cancel(self, request_id: str) -> bool:
        """Ends a request of this worker. Whether there is one of this id."""
        watched = self._service.monitor.requests.find(request_id)
        if watched is not None:
            watched.cancel()
        return watched is not None

    async def cancel_elsewhere(self, request_id: str) -> bool:
        """As `cancel`, of the other workers. Raises Overloaded where one does not say."""
        if not may_be_an_id(request_id):
            return False
        target = f"{INTERNAL}/requests/{quote(request_id, safe='')}/cancel"
        return _found(await self._ask_all(target, "POST")) is not None

    def find(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        """What is known here of a tenant's own request."""
        found = self._service.monitor.requests.find_by_client_id(tenant, request_id)
        return None if found is None else _told(found)

    async def find_anywhere(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        """As `find`, of all workers. Raises Overloaded where one does not say, or many wait."""
        if not may_be_an_id(request_id):
            return None
        if (found := self.find(tenant, request_id)) is not None or not self._siblings:
            return found
        if self._waiting[tenant] >= _MOST_WAITING:
            raise Overloaded(f"{_MOST_WAITING} such requests of this key wait already; try again.")
        query = urlencode({"tenant": tenant})
        target = f"{INTERNAL}/requests/{quote(request_id, safe='')}?{query}"
        self._waiting[tenant] += 1
        try:
            async with self._asks[tenant], self._asking:
                said = _found(await self._ask_all(target))
        finally:
            self._waiting[tenant] -= 1
        return None if said is None else orjson.loads(said.body)

    async def _ask_all(self, target: str, method: str = "GET") -> list[Said | None]:
        return await asyncio.gather(*[ask(path, target, method) for path in self._siblings])

    async def _state(self) -> dict[str, Any]:
        own, others = await asyncio.gather(self._whole(), self._ask_all(f"{INTERNAL}/part"))
        told = [orjson.loads(s.body) for s in others if s is not None and s.status == 200]
        return merge_parts([own, *told], now())


def _found(said: Sequence[Said | None]) -> Said | None:
    """What the worker says that has it; None where all say that they do not.

    Raises Overloaded where none has it and one did not say: it may be that one.
    """
    for each in said:
        if each is not None and each.status == 200:
            return each
    if any(each is None or each.status != 404 for each in said):
        raise Overloaded(_SILENT)
    return None


def _told(found: WatchedRequest | RequestSummary) -> dict[str, Any]:
    """For the tenant: nothing that is the operator's, such as where it ran."""
    if isinstance(found, WatchedRequest):
        facts = found.facts()
    else:
        facts = found.facts() | found.outcome()
        facts["state"] = "stopping" if found.stopping else "ended"
    kept = ("state", "model", "started", "prompt_tokens", "completion_tokens", "ended", "status")
    told = {name: facts[name] for name in (*kept, "stop", "stop_ms") if name in facts}
    return {"id": facts["request_id"], "object": "request"} | told
