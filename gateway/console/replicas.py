"""JSON descriptions of the replicas for the console, as one worker knows them."""

from __future__ import annotations

from gateway.scheduling.replica import Replica
from gateway.service import Service

_MAX_REASON_CHARS = 300  # longer reasons are truncated

WORST_FIRST = ("away", "failing", "leaving", "draining", "ready")
"""Replica states, the worst first.

If workers report different states of a replica, the console shows the worst of them.
"""

SUMMED_FIELDS = ("in_flight", "requests", "places")
"""Fields that each worker counts separately. The module `merge` adds the workers' numbers."""


def describe_replicas(service: Service) -> dict[str, dict[str, object]]:
    """Return a JSON description of each replica, by endpoint.

    If a replica was removed and added again, two `Replica` objects with the same endpoint exist for
    a while. The result describes the new object.
    """
    return {replica.endpoint: _describe_replica(service, replica) for replica in service.replicas}


def _describe_replica(service: Service, replica: Replica) -> dict[str, object]:
    facts: dict[str, object] = {
        "state": _find_state(replica),
        "weight": replica.weight,
        "drain": replica.drained_at is not None,
        "in_flight": replica.in_flight,
        "requests": replica.requests,
    }
    if (override := service.overrides.current.get(replica.endpoint)) is not None:
        facts["override"] = override.to_dict()
    if (places := service.replicas.slots.slots_of(replica)) is not None:
        facts["places"] = places
    if (selection := replica.engine.last_selection) is not None:
        facts["mode"] = selection.capabilities.mode
        facts["model"] = selection.capabilities.model
    if not replica.engine.ready:
        facts["why"] = replica.engine.why_not_ready[:_MAX_REASON_CHARS]
    if (failure := replica.last_failure) is not None:
        facts["last_failure"] = {
            "time": round(failure.at, 2),
            "message": failure.why[:_MAX_REASON_CHARS],
        }
    return facts


def _find_state(replica: Replica) -> str:
    if not replica.engine.ready:
        return "away"
    if replica.leaving:
        return "leaving"
    if replica.drained_at is not None:
        return "draining"
    return "failing" if replica.breaker.is_open else "ready"
