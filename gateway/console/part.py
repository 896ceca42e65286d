"""What one worker of a gateway knows: a part of the state, which `merge` joins with the others'."""

from __future__ import annotations

import time
from importlib.metadata import version
from itertools import islice
from typing import Any

from gateway.console.adapters import MOST as MOST_ADAPTERS
from gateway.console.adapters import AdapterFacts
from gateway.console.replicas import replicas
from gateway.console.tenants import MOST as MOST_TENANTS
from gateway.console.tenants import TenantFacts
from gateway.service import Service

MOST_REQUESTS = 1000
"""Running requests of one worker that are shown."""
_RELEASE = version("triton-openai-gateway")

Part = dict[str, Any]


class Parts:
    """Makes the part of this worker, anew each time. `worker` is its number."""

    def __init__(self, service: Service, worker: int) -> None:
        self._service = service
        self._worker = worker
        self._adapters = AdapterFacts()
        self._tenants = TenantFacts()

    async def make(self, *, whole: bool) -> Part:
        """`whole` is the part that others are joined to: of others, what is the same in all workers
        is left out."""
        service, monitor = self._service, self._service.monitor
        _, _, rates = monitor.demand.a_minute()
        part: Part = {
            "worker": self._worker,
            "replicas": replicas(service),
            "waiting": service.admission.waiting,
            "waiting_to_begin": service.starts.waiting,
            "in_flight": service.admission.in_flight,
            "places": service.admission.slots,
            "adapters": await self._adapters.of(service, rates, whole=whole),
            "tenants": await self._tenants.of(service, whole=whole),
            "troubles": service.troubles.facts(),
            "history": {str(point.at): point.facts() for point in monitor.history.points},
        }
        self._add_requests(part)
        if whole:
            part["gateway"] = self._gateway()
            self._add_left_out(part)
        return part

    def _add_requests(self, part: Part) -> None:
        """Nothing is waited for here, so that no request is in neither list, or in both."""
        requests = self._service.monitor.requests
        running = {
            watched.id: watched.facts() | {"worker": self._worker}
            for watched in islice(requests, MOST_REQUESTS)
        }
        over: dict[str, dict[str, object]] = {}
        for ended in requests.last:
            own = ended.facts() | {"worker": self._worker}
            if ended.stopping:
                running[ended.id] = own | {"state": "stopping"}
            else:
                over[ended.id] = own | ended.outcome()
        part["requests"], part["ended"] = running, over
        if len(requests) > MOST_REQUESTS:
            part["left_out"] = {"requests": len(requests) - MOST_REQUESTS}

    def _gateway(self) -> dict[str, object]:
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

    def _add_left_out(self, part: Part) -> None:
        counts = {
            "adapters": len(self._service.adapters.records) - MOST_ADAPTERS,
            "tenants": len(self._service.configuration.current.tenants or ()) - MOST_TENANTS,
        }
        if more := {name: count for name, count in counts.items() if count > 0}:
            part["left_out"] = part.get("left_out", {}) | more


def now() -> float:
    return round(time.time(), 2)
