"""Data for consoles: the part of this worker, and the merged state of all workers."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from gateway.api.request_log import is_request_id
from gateway.api.siblings import WorkerResponse, ask
from gateway.console.feed import Feed
from gateway.console.merge import merge_parts
from gateway.console.part import Part, PartBuilder, now
from gateway.console.shared import SharedResult
from gateway.errors import Overloaded
from gateway.http.workers import Worker
from gateway.monitor.watched import RequestSummary, WatchedRequest
from gateway.service import Service

INTERNAL = "/internal/console"
_MAX_READERS = 16
_MAX_CONCURRENT_LOOKUPS = 4
_MAX_WAITING = 16
_SILENT = "Another worker of this gateway does not answer now; try again."


class Console:
    """The console's data, for one event loop. Nothing is computed without a reader."""

    def __init__(self, service: Service, worker: Worker | None) -> None:
        self._service = service
        self._siblings = [] if worker is None else worker.siblings
        parts = PartBuilder(service, 0 if worker is None else worker.index)
        self._make_full_part = partial(parts.make, complete=True)
        self.part = SharedResult[Part](partial(parts.make, complete=False))
        """The part of this worker, for the other workers."""
        self.feed = Feed(self._build_state)
        self._readers = 0
        # Looking up an unknown request asks all workers. So one lookup runs per tenant and a few in
        # total, and the number of waiting lookups is limited.
        self._lookup_slots = asyncio.Semaphore(_MAX_CONCURRENT_LOOKUPS)
        self._tenant_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting = Counter[str]()

    def enter(self) -> None:
        """Add a reader of events; the caller must call `leave` at the end.

        Raise Overloaded above the limit of readers.
        """
        if self._readers >= _MAX_READERS:
            raise Overloaded(f"{_MAX_READERS} consoles follow this gateway's events already.")
        self._readers += 1

    def leave(self) -> None:
        self._readers -= 1

    def cancel(self, request_id: str) -> bool:
        """Cancel a request of this worker; return False if the id is unknown."""
        watched = self._service.monitor.requests.find(request_id)
        if watched is not None:
            watched.cancel()
        return watched is not None

    async def cancel_on_siblings(self, request_id: str) -> bool:
        """Cancel a request of another worker, like `cancel`.

        Raise Overloaded if the request was not found and a worker did not answer.
        """
        if not is_request_id(request_id):
            return False
        target = f"{INTERNAL}/requests/{quote(request_id, safe='')}/cancel"
        return _pick_response(await self._ask_all(target, "POST")) is not None

    def find(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        """Return the facts about a tenant's own request on this worker; None if unknown."""
        found = self._service.monitor.requests.find_by_client_id(tenant, request_id)
        return None if found is None else _to_tenant_facts(found)

    async def find_anywhere(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        """Find a request on all workers, like `find`.

        Raise Overloaded if a worker does not answer or too many lookups wait.
        """
        if not is_request_id(request_id):
            return None
        if (found := self.find(tenant, request_id)) is not None or not self._siblings:
            return found
        if self._waiting[tenant] >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} such requests of this key wait already; try again.")
        query = urlencode({"tenant": tenant})
        target = f"{INTERNAL}/requests/{quote(request_id, safe='')}?{query}"
        self._waiting[tenant] += 1
        try:
            async with self._tenant_locks[tenant], self._lookup_slots:
                response = _pick_response(await self._ask_all(target))
        finally:
            self._waiting[tenant] -= 1
        return None if response is None else orjson.loads(response.body)

    async def _ask_all(self, target: str, method: str = "GET") -> list[WorkerResponse | None]:
        return await asyncio.gather(*[ask(path, target, method) for path in self._siblings])

    async def _build_state(self) -> dict[str, Any]:
        own, others = await asyncio.gather(
            self._make_full_part(), self._ask_all(f"{INTERNAL}/part")
        )
        parts = [orjson.loads(s.body) for s in others if s is not None and s.status == 200]
        return merge_parts([own, *parts], now())


def _pick_response(responses: Sequence[WorkerResponse | None]) -> WorkerResponse | None:
    """Return the successful response of a worker; None if all workers answered 404.

    Raise Overloaded if all others failed and one did not answer, as that one may have the request.
    """
    for each in responses:
        if each is not None and each.status == 200:
            return each
    if any(each is None or each.status != 404 for each in responses):
        raise Overloaded(_SILENT)
    return None


def _to_tenant_facts(found: WatchedRequest | RequestSummary) -> dict[str, Any]:
    """Return the facts that a tenant may see, without operators' data such as the replica."""
    if isinstance(found, WatchedRequest):
        facts = found.facts()
    else:
        facts = found.facts() | found.outcome()
        facts["state"] = "stopping" if found.stopping else "ended"
    names = ("state", "model", "started", "prompt_tokens", "completion_tokens", "ended", "status")
    shown = {name: facts[name] for name in (*names, "stop", "stop_ms") if name in facts}
    return {"id": facts["request_id"], "object": "request"} | shown
