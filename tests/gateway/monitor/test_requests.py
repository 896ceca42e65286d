"""What is kept of requests that ended: a minute, for whose they were, never without bound."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from gateway.generation import Batch, Caller
from gateway.monitor import requests
from gateway.monitor.demand import Demand
from gateway.monitor.requests import KEPT_S, Requests
from gateway.monitor.watched import Ended, Watched
from gateway.observability.request_context import RequestContext


def _batch(number: int, tenant: str) -> Batch:
    return Batch(
        request_id=f"own-{number}",
        generations=[],
        prompts=1,
        choices=1,
        prompt_tokens=3,
        fingerprint="",
        caller=Caller(tenant=tenant),
        timeout_s=1.0,
        deadline=1.0,
    )


def _ended(number: int, tenant: str, request_id: str | None = None) -> Ended:
    context = RequestContext(request_id or f"r{number}", tenant=tenant)
    return Ended(context, _batch(number, tenant), 200)


def test_a_tenant_finds_its_own_and_nobody_elses() -> None:
    kept = Requests()
    kept.end(_ended(1, "a", "same"))
    kept.end(_ended(2, "b", "same"))
    mine, others = kept.of("a", "same"), kept.of("b", "same")
    assert isinstance(mine, Ended)
    assert isinstance(others, Ended)
    assert (mine.id, others.id) == ("own-1", "own-2")
    assert kept.of("c", "same") is None


def test_a_tenant_with_many_loses_its_own_oldest() -> None:
    kept = Requests()
    kept.end(_ended(0, "quiet"))
    for number in range(1, 2000):
        kept.end(_ended(number, "loud"))
    assert kept.of("quiet", "r0") is not None
    assert kept.of("loud", "r1") is None
    assert kept.of("loud", "r1999") is not None
    assert len(kept.last) == 100


def test_what_is_old_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Requests()
    kept.end(_ended(1, "a"))
    later = requests.time.time() + KEPT_S + 1
    monkeypatch.setattr(requests.time, "time", lambda: later)
    assert kept.of("a", "r1") is None


async def test_ids_that_clients_repeat_hide_nothing() -> None:
    kept = Requests()
    context = RequestContext("same")
    first, second = (kept.begin(context, _batch(number, "a")) for number in range(2))
    assert [watched.id for watched in kept] == ["own-0", "own-1"]
    kept.leave(first)
    assert kept.find("own-0") is None
    assert kept.find("own-1") is second


async def test_only_the_cancellation_of_an_admin_is_taken_back() -> None:
    context = RequestContext("r")

    async def work(started: asyncio.Event) -> bool:
        watched = Watched(context, _batch(1, "a"))
        seen.append(watched)
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return watched.taken_back()
        return False

    for by_admin in (True, False):
        seen: list[Watched] = []
        context = dataclasses.replace(context, cancelled=False, left=None)
        task = asyncio.create_task(work(started := asyncio.Event()))
        await started.wait()
        if by_admin:
            seen[0].cancel()
            assert seen[0].state == "stopping"
        else:
            task.cancel()
        assert await task is by_admin


def test_refusals_are_counted_by_reason() -> None:
    demand = Demand()
    demand.refuse("a", "queue_full")
    demand.refuse("a", "requests_per_minute")
    demand.refuse("a", "queue_full")
    assert demand.refused == {"a": {"queue_full": 2, "requests_per_minute": 1}}
    assert demand.refusals["a"].why == "queue_full"


def test_a_mistake_of_the_clients_hides_no_other_refusal() -> None:
    demand = Demand()
    demand.refuse("a", "model_not_found", mistake=True)
    assert demand.refusals["a"].mistake
    demand.refuse("a", "queue_full")
    demand.refuse("a", "model_not_found", mistake=True)
    assert (demand.refusals["a"].why, demand.refusals["a"].mistake) == ("queue_full", False)
    assert demand.refused["a"] == {"model_not_found": 2, "queue_full": 1}
