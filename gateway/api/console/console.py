"""Data for the web consoles: the current replicas, adapters, tenants and requests of all workers.

Each worker collects its own part of the data. The worker that serves a console requests the parts
of the other workers and merges all parts.
"""

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
    """Source of the data that the web consoles show. Each event loop has its own instance.

    The data is computed only while at least one console reads it.
    """

    def __init__(self, service: Service, worker: Worker | None) -> None:
        self._service = service
        self._siblings = [] if worker is None else worker.siblings
        parts = PartBuilder(service, 0 if worker is None else worker.index)
        self._make_full_part = partial(parts.make, complete=True)
        self.part = SharedResult[Part](partial(parts.make, complete=False))
        """This worker's part of the console data. Other workers request the part and merge it."""
        self.feed = Feed(self._build_state)
        self._readers = 0
        # A search for a request asks all other workers over HTTP. So each tenant may run one search
        # at a time, and all tenants together a few. The number of waiting searches of a tenant is
        # limited, too.
        self._lookup_slots = asyncio.Semaphore(_MAX_CONCURRENT_LOOKUPS)
        self._tenant_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting = Counter[str]()

    def enter(self) -> None:
        """Count a new reader of the event stream.

        The caller must call `leave` when the reader disconnects. Raise Overloaded if
        there are too many readers already.
        """
        if self._readers >= _MAX_READERS:
            raise Overloaded(f"{_MAX_READERS} consoles follow this gateway's events already.")
        self._readers += 1

    def leave(self) -> None:
        self._readers -= 1

    def cancel(self, request_id: str) -> bool:
        """Cancel a request that this worker serves. Return False if no request has this id."""
        watched = self._service.monitor.requests.find(request_id)
        if watched is not None:
            watched.cancel()
        return watched is not None

    async def cancel_on_siblings(self, request_id: str) -> bool:
        """Cancel a request that another worker serves. Return False if no request has this id.

        Raise Overloaded if the request was not found, but a worker did not answer.
        """
        if not is_request_id(request_id):
            return False
        target = f"{INTERNAL}/requests/{quote(request_id, safe='')}/cancel"
        return _pick_response(await self._ask_all(target, "POST")) is not None

    def find(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        """Return the state of a tenant's request on this worker, as members of a JSON object.

        Return None if the tenant has no request with this id here.
        """
        found = self._service.monitor.requests.find_by_client_id(tenant, request_id)
        return None if found is None else _to_tenant_facts(found)

    async def find_anywhere(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        """Return the state of a tenant's request on any worker, like `find`.

        Raise Overloaded if no worker has found the request and a worker did not answer. Also raise
        it if too many calls of this method for the tenant already wait.
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

    Raise Overloaded if no response is successful and at least one worker failed or did not answer.
    In this case, the request may be at such a worker.
    """
    for each in responses:
        if each is not None and each.status == 200:
            return each
    if any(each is None or each.status != 404 for each in responses):
        raise Overloaded(_SILENT)
    return None


def _to_tenant_facts(found: WatchedRequest | RequestSummary) -> dict[str, Any]:
    """Return the facts about a request that its tenant may see, as members of a JSON object.

    Data for operators, such as the replica, is left out.
    """
    if isinstance(found, WatchedRequest):
        facts = found.facts()
    else:
        facts = found.facts() | found.outcome()
        facts["state"] = "stopping" if found.stopping else "ended"
    names = ("state", "model", "started", "prompt_tokens", "completion_tokens", "ended", "status")
    shown = {name: facts[name] for name in (*names, "stop", "stop_ms") if name in facts}
    return {"id": facts["request_id"], "object": "request"} | shown
