"""Data of one worker for the console (a "part"). The module `merge` combines all workers' parts."""

from __future__ import annotations

import time
from importlib.metadata import version
from itertools import islice
from typing import Any

from gateway.console.adapters import MAX_ADAPTERS, AdapterFacts
from gateway.console.replicas import describe_replicas
from gateway.console.tenants import MAX_TENANTS, TenantFacts
from gateway.service import Service

MAX_REQUESTS = 1000
"""Maximum number of running requests in the data of one worker."""
_RELEASE = version("triton-openai-gateway")

Part = dict[str, Any]


class PartBuilder:
    """Builder of this worker's data. `worker` is the worker's number in the gateway."""

    def __init__(self, service: Service, worker: int) -> None:
        self._service = service
        self._worker = worker
        self._adapters = AdapterFacts()
        self._tenants = TenantFacts()

    async def make(self, *, complete: bool) -> Part:
        """Return the present data of this worker.

        If `complete` is False, omit the fields that are the same in all workers. `merge` needs
        these fields in the part of one worker only.
        """
        service, monitor = self._service, self._service.monitor
        _, _, rates = monitor.demand.per_minute()
        part: Part = {
            "worker": self._worker,
            "replicas": describe_replicas(service),
            "waiting": service.admission.waiting,
            "waiting_to_begin": service.starts.waiting,
            "in_flight": service.admission.in_flight,
            "places": service.admission.slots,
            "adapters": await self._adapters.collect(service, rates, complete=complete),
            "tenants": await self._tenants.collect(service, complete=complete),
            "troubles": service.troubles.facts(),
            "history": {str(point.at): point.facts() for point in monitor.history.points},
        }
        self._add_requests(part)
        if complete:
            part["gateway"] = self._describe_gateway()
            self._add_omitted(part)
        return part

    def _add_requests(self, part: Part) -> None:
        """Add running and ended requests to `part`.

        This method must not await: a request that ends meanwhile would be listed twice or not at
        all.
        """
        requests = self._service.monitor.requests
        running = {
            watched.id: watched.facts() | {"worker": self._worker}
            for watched in islice(requests, MAX_REQUESTS)
        }
        over: dict[str, dict[str, object]] = {}
        for ended in requests.last:
            own = ended.facts() | {"worker": self._worker}
            if ended.stopping:
                running[ended.id] = own | {"state": "stopping"}
            else:
                over[ended.id] = own | ended.outcome()
        part["requests"], part["ended"] = running, over
        if len(requests) > MAX_REQUESTS:
            part["left_out"] = {"requests": len(requests) - MAX_REQUESTS}

    def _describe_gateway(self) -> dict[str, object]:
        service = self._service
        facts: dict[str, object] = {
            "version": _RELEASE,
            "model": service.settings.model_name,
            "started": round(service.monitor.started, 2),
            "workers": service.settings.workers,
            "ready": service.replicas.ready and service.started.is_set(),
        }
        if service.settings.redis_url is not None:
            facts["redis"] = "up" if service.adapters.store.stats.redis_up else "down"
        return facts

    def _add_omitted(self, part: Part) -> None:
        counts = {
            "adapters": len(self._service.adapters.records) - MAX_ADAPTERS,
            "tenants": len(self._service.configuration.current.tenants or ()) - MAX_TENANTS,
        }
        if more := {name: count for name, count in counts.items() if count > 0}:
            part["left_out"] = part.get("left_out", {}) | more


def now() -> float:
    return round(time.time(), 2)
