"""The requests that generate in this process, and the last ones that did.

To begin and to end costs a request some entries in tables; everything else is worked out when
somebody looks.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from gateway.generation import Batch
from gateway.monitor.watched import EndedRequest, WatchedRequest
from gateway.observability.request_context import RequestContext

RETENTION_S = 60.0
_MAX_ENDED = 100
_MAX_ENDED_PER_TENANT = 256
"""A minute of a playground, or of a client that asks for each of its requests, at four a second. A
tenant with more loses its own oldest, and nobody else's."""


class RequestTable:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, WatchedRequest] = {}
        self._last: deque[EndedRequest] = deque(maxlen=_MAX_ENDED)
        self._ended_by_tenant: dict[str, OrderedDict[str, EndedRequest]] = {}
        """By the tenant, then by the id that its client has. There are no more tenants than the
        configuration has had."""

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[WatchedRequest]:
        return iter(self._running.values())

    def begin(self, context: RequestContext, batch: Batch) -> WatchedRequest:
        watched = self._running[batch.request_id] = WatchedRequest(context, batch)
        return watched

    def remove(self, watched: WatchedRequest) -> None:
        """It generates no more."""
        self._running.pop(watched.batch.request_id, None)

    def end(self, ended: EndedRequest) -> None:
        """It has been answered."""
        self._last.append(ended)
        own = self._ended_by_tenant.get(ended.tenant)
        if own is None:
            own = self._ended_by_tenant[ended.tenant] = OrderedDict()
        own[ended.request_id] = ended
        own.move_to_end(ended.request_id)
        if len(own) > _MAX_ENDED_PER_TENANT:
            own.popitem(last=False)

    def find(self, request_id: str) -> WatchedRequest | None:
        """By the gateway's own id."""
        return self._running.get(request_id)

    @property
    def last(self) -> list[EndedRequest]:
        """Those that ended last, the engines of which may still be at work for them."""
        return list(self._last)

    def find_by_client_id(
        self, tenant: str, request_id: str
    ) -> WatchedRequest | EndedRequest | None:
        """What this tenant calls so, if it runs or ended within `RETENTION_S`."""
        for watched in self._running.values():
            if watched.context.request_id == request_id and watched.batch.caller.tenant == tenant:
                return watched
        self._forget_old(tenant)
        own = self._ended_by_tenant.get(tenant)
        return None if own is None else own.get(request_id)

    def tidy(self) -> None:
        """To be called now and then: forgets what is older than `RETENTION_S`."""
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
