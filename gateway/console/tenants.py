"""Tenants: what they ask for, what they were refused, their limits and their keys."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gateway.config.limits import LIMITS
from gateway.config.tenants import Tenant
from gateway.errors import KeysUnavailable
from gateway.service import Service
from gateway.tenancy.keys.record import KeyRecord, Uses, key_id

MOST_KEYS = 100
"""Of one tenant that are shown."""
MOST = 1000
"""Tenants that are shown."""
ADDED = ("running", "waiting", "requests_per_minute", "tokens_per_minute")
"""What each worker has its own of, so that the state has the sum."""
_USES_S = 15.0

Facts = dict[str, object]


class TenantFacts:
    """Asks only now and then when keys were used: that is read from Redis, or a disk."""

    def __init__(self) -> None:
        self._uses: Uses = {}
        self._asked = 0.0

    async def of(self, service: Service, *, whole: bool) -> dict[str, Facts]:
        """By name. Without `whole`, only what other workers see differently."""
        demand = service.monitor.demand
        requests, tokens, _ = demand.a_minute()
        running, places = Counter[str](), Counter[str]()
        for watched in service.monitor.requests:
            name = watched.batch.caller.tenant
            running[name] += 1
            places[name] += watched.batch.places
        waiting = service.admission.waiting_by_tenant
        waiting_to_begin = service.starts.waiting_by_tenant
        issued: dict[str, list[KeyRecord]] = {}
        if whole and service.keys is not None:
            issued = await self._issued(service)
        found: dict[str, Facts] = {}
        for tenant in (service.configuration.current.tenants or [])[:MOST]:
            name = tenant.name
            facts: Facts = {
                "running": running[name],
                "waiting": waiting.get(name, 0) + waiting_to_begin.get(name, 0),
                "requests_per_minute": requests.get(name, 0.0),
                "tokens_per_minute": tokens.get(name, 0.0),
            }
            if (refused := demand.refused.get(name)) is not None:
                facts["refused"] = dict(refused)
                last = demand.refusals[name]
                told: Facts = {"time": last.at, "why": last.why}
                facts["last_refusal"] = told | ({"mistake": True} if last.mistake else {})
            facts["limits"] = _limits(service, tenant, places[name])
            if whole:
                facts["keys"] = self._keys(tenant, issued.get(name, ()))
            found[name] = facts
        return found

    async def _issued(self, service: Service) -> dict[str, list[KeyRecord]]:
        assert service.keys is not None
        if time.monotonic() - self._asked > _USES_S:
            self._asked = time.monotonic()
            with suppress(KeysUnavailable):  # what was known of it is shown
                self._uses = await service.keys.uses()
        by_tenant: dict[str, list[KeyRecord]] = {}
        with suppress(KeysUnavailable):
            for record in service.keys.records:
                by_tenant.setdefault(record.tenant, []).append(record)
        return by_tenant

    def _keys(self, tenant: Tenant, issued: Sequence[KeyRecord]) -> dict[str, Facts]:
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
        return dict(list(found.items())[:MOST_KEYS])


def _limits(service: Service, tenant: Tenant, places: int) -> dict[str, Mapping[str, int]]:
    told = service.accounting.report_limits(tenant.name)
    found: dict[str, Mapping[str, int]] = {}
    for name, kind in LIMITS.items():
        limit = getattr(tenant, name)
        if limit is None:
            continue
        used = told[name].used if name in told else 0
        if kind.counts == "slots":
            used = places
        found[name] = {"limit": limit, "used": used}
    return found
