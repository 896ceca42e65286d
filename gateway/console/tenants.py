"""JSON descriptions of the tenants for the console: demand, refused requests, limits and keys."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gateway.config.limits import LIMITS
from gateway.config.tenants import Tenant
from gateway.errors import DatabaseUnavailable
from gateway.service import Service
from gateway.tenancy.keys.record import KeyRecord, Uses, key_id

MAX_KEYS = 100
"""Maximum number of keys of one tenant that are listed."""
MAX_TENANTS = 1000
"""Maximum number of tenants that are listed."""
SUMMED_FIELDS = ("running", "waiting", "requests_per_minute", "tokens_per_minute")
"""Fields that each worker counts separately. The module `merge` adds the workers' numbers."""
_USES_INTERVAL_S = 15.0

Facts = dict[str, object]


class TenantFacts:
    """Builder of the JSON descriptions of tenants, for the console.

    The times at which keys were last used come from Redis or the disk. To limit the load, these
    times are read only every `_USES_INTERVAL_S` seconds.
    """

    def __init__(self) -> None:
        self._uses: Uses = {}
        self._uses_read_at = 0.0

    async def collect(self, service: Service, *, complete: bool) -> dict[str, Facts]:
        """Return a JSON description of each tenant, by name.

        If `complete` is False, omit the fields that are the same in all workers. Only one worker
        needs to add these fields to the merged data.
        """
        demand = service.monitor.demand
        requests, tokens, _ = demand.per_minute()
        running, places = Counter[str](), Counter[str]()
        for watched in service.monitor.requests:
            name = watched.batch.caller.tenant
            running[name] += 1
            places[name] += watched.batch.slots
        waiting = service.admission.waiting_by_tenant
        waiting_to_begin = service.starts.waiting_by_tenant
        issued: dict[str, list[KeyRecord]] = {}
        if complete and service.keys is not None:
            issued = await self._load_issued(service)
        found: dict[str, Facts] = {}
        for tenant in (service.configuration.current.tenants or [])[:MAX_TENANTS]:
            name = tenant.name
            facts: Facts = {
                "running": running[name],
                "waiting": waiting.get(name, 0) + waiting_to_begin.get(name, 0),
                "requests_per_minute": requests.get(name, 0.0),
                "tokens_per_minute": tokens.get(name, 0.0),
            }
            if (refused := demand.refused.get(name)) is not None:
                facts["refused"] = dict(refused)
                last_refusal = demand.refusals[name]
                refusal: Facts = {"time": last_refusal.at, "why": last_refusal.why}
                facts["last_refusal"] = refusal | (
                    {"mistake": True} if last_refusal.mistake else {}
                )
            facts["limits"] = _describe_limits(service, tenant, places[name])
            if complete:
                facts["keys"] = self._describe_keys(tenant, issued.get(name, ()))
            found[name] = facts
        return found

    async def _load_issued(self, service: Service) -> dict[str, list[KeyRecord]]:
        assert service.keys is not None
        if time.monotonic() - self._uses_read_at > _USES_INTERVAL_S:
            self._uses_read_at = time.monotonic()
            with suppress(DatabaseUnavailable):  # on failure, show the last known uses
                self._uses = await service.keys.uses()
        by_tenant: dict[str, list[KeyRecord]] = {}
        with suppress(DatabaseUnavailable):
            for record in service.keys.records:
                by_tenant.setdefault(record.tenant, []).append(record)
        return by_tenant

    def _describe_keys(self, tenant: Tenant, issued: Sequence[KeyRecord]) -> dict[str, Facts]:
        found: dict[str, Facts] = {key_id(key): {"from": "file"} for key in tenant.keys}
        for record in issued:
            facts: Facts = {"from": "api", "created": record.created}
            if record.note:
                facts["note"] = record.note
            if record.expires is not None:
                facts["expires"] = record.expires
            if (used := self._uses.get(record.id)) is not None:
                facts["last_used"] = used
            found[record.id] = facts
        return dict(list(found.items())[:MAX_KEYS])


def _describe_limits(service: Service, tenant: Tenant, places: int) -> dict[str, Mapping[str, int]]:
    standings = service.accounting.report_limits(tenant.name)
    found: dict[str, Mapping[str, int]] = {}
    for name, kind in LIMITS.items():
        limit = getattr(tenant, name)
        if limit is None:
            continue
        used = standings[name].used if name in standings else 0
        if kind.counts == "slots":
            used = places
        found[name] = {"limit": limit, "used": used}
    return found
