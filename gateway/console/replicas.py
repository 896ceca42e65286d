"""The replicas, as one worker sees them."""

from __future__ import annotations

from gateway.scheduling.replica import Replica
from gateway.service import Service

_WHY = 300  # characters of a reason

WORST_FIRST = ("away", "failing", "leaving", "draining", "ready")
"""Of a replica that workers see in different states, the first of these is told."""

ADDED = ("in_flight", "requests", "places")
"""What each worker has its own of, so that the state has the sum; all else is the same in each."""


def replicas(service: Service) -> dict[str, dict[str, object]]:
    """By endpoint; of one that left and is there again, the newer."""
    return {replica.endpoint: _replica(service, replica) for replica in service.replicas}


def _replica(service: Service, replica: Replica) -> dict[str, object]:
    facts: dict[str, object] = {
        "state": _state(replica),
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
        facts["why"] = replica.engine.why_not_ready[:_WHY]
    if (failure := replica.last_failure) is not None:
        facts["last_failure"] = {"time": round(failure.at, 2), "message": failure.why[:_WHY]}
    return facts


def _state(replica: Replica) -> str:
    if not replica.engine.ready:
        return "away"
    if replica.leaving:
        return "leaving"
    if replica.drained_at is not None:
        return "draining"
    return "failing" if replica.breaker.is_open else "ready"
