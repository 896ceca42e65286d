"""Table of the running requests of this process, and of requests that ended recently.

Only the start and the end of a request update the table. All other facts, such as the number of
generated tokens, are computed when the console reads them.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from gateway.generation.batch import Batch
from gateway.monitor.watched import RequestSummary, WatchedRequest
from gateway.observability.request_context import RequestContext

RETENTION_S = 60.0
_MAX_ENDED = 100
_MAX_ENDED_PER_TENANT = 256
"""Maximum number of ended requests that are stored per tenant.

The maximum suffices for one minute of a client with four requests per second. A tenant with more
requests displaces only its own oldest entries.
"""


class RequestTable:
    """The running and recently ended requests of one process. Use it on one event loop only."""

    def __init__(self) -> None:
        self._running: dict[str, WatchedRequest] = {}
        self._last: deque[RequestSummary] = deque(maxlen=_MAX_ENDED)
        self._ended_by_tenant: dict[str, OrderedDict[str, RequestSummary]] = {}
        """Ended requests by tenant, then by the client's request id.

        The memory is bounded, because the configuration lists all tenants.
        """

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[WatchedRequest]:
        return iter(self._running.values())

    def begin(self, context: RequestContext, batch: Batch) -> WatchedRequest:
        watched = self._running[batch.request_id] = WatchedRequest(context, batch)
        return watched

    def remove(self, watched: WatchedRequest) -> None:
        """Remove a request from the running requests."""
        self._running.pop(watched.batch.request_id, None)

    def end(self, ended: RequestSummary) -> None:
        """Add the summary of a request that has ended."""
        self._last.append(ended)
        own = self._ended_by_tenant.get(ended.tenant)
        if own is None:
            own = self._ended_by_tenant[ended.tenant] = OrderedDict()
        own[ended.request_id] = ended
        own.move_to_end(ended.request_id)
        if len(own) > _MAX_ENDED_PER_TENANT:
            own.popitem(last=False)

    def find(self, request_id: str) -> WatchedRequest | None:
        """Return the running request with this internal id. Return None if there is none."""
        return self._running.get(request_id)

    @property
    def last(self) -> list[RequestSummary]:
        """Summaries of the last 100 ended requests. Engines may still be stopping some of them."""
        return list(self._last)

    def find_by_client_id(
        self, tenant: str, request_id: str
    ) -> WatchedRequest | RequestSummary | None:
        """Return a tenant's request by its `x-request-id`.

        Return None if the request does not run and has not ended in the last `RETENTION_S` seconds.
        """
        for watched in self._running.values():
            if watched.context.request_id == request_id and watched.batch.caller.tenant == tenant:
                return watched
        self._forget_old(tenant)
        own = self._ended_by_tenant.get(tenant)
        return None if own is None else own.get(request_id)

    def tidy(self) -> None:
        """Remove requests that ended over `RETENTION_S` seconds ago. Must be called regularly."""
        for tenant in list(self._ended_by_tenant):
            self._forget_old(tenant)

    def _forget_old(self, tenant: str) -> None:
        own = self._ended_by_tenant.get(tenant)
        if own is None:
            return
        oldest = time.time() - RETENTION_S
        while own and next(iter(own.values())).at < oldest:
            own.popitem(last=False)
        if not own:
            del self._ended_by_tenant[tenant]
