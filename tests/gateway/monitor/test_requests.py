"""Table of ended requests: stored for a minute, for their own tenant, in bounded number."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from gateway.generation.batch import Batch
from gateway.generation.options import Caller
from gateway.monitor import requests
from gateway.monitor.demand import TenantDemand
from gateway.monitor.requests import RETENTION_S, RequestTable
from gateway.monitor.watched import RequestSummary, WatchedRequest
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


def _ended(number: int, tenant: str, request_id: str | None = None) -> RequestSummary:
    context = RequestContext(request_id or f"r{number}", tenant=tenant)
    return RequestSummary(context, _batch(number, tenant), 200)


def test_a_tenant_finds_its_own_and_nobody_elses() -> None:
    kept = RequestTable()
    kept.end(_ended(1, "a", "same"))
    kept.end(_ended(2, "b", "same"))
    mine, others = kept.find_by_client_id("a", "same"), kept.find_by_client_id("b", "same")
    assert isinstance(mine, RequestSummary)
    assert isinstance(others, RequestSummary)
    assert (mine.id, others.id) == ("own-1", "own-2")
    assert kept.find_by_client_id("c", "same") is None


def test_a_tenant_with_many_loses_its_own_oldest() -> None:
    kept = RequestTable()
    kept.end(_ended(0, "quiet"))
    for number in range(1, 2000):
        kept.end(_ended(number, "loud"))
    assert kept.find_by_client_id("quiet", "r0") is not None
    assert kept.find_by_client_id("loud", "r1") is None
    assert kept.find_by_client_id("loud", "r1999") is not None
    assert len(kept.last) == 100


def test_what_is_old_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RequestTable()
    kept.end(_ended(1, "a"))
    later = requests.time.time() + RETENTION_S + 1
    monkeypatch.setattr(requests.time, "time", lambda: later)
    assert kept.find_by_client_id("a", "r1") is None


async def test_ids_that_clients_repeat_hide_nothing() -> None:
    kept = RequestTable()
    context = RequestContext("same")
    first, second = (kept.begin(context, _batch(number, "a")) for number in range(2))
    assert [watched.id for watched in kept] == ["own-0", "own-1"]
    kept.remove(first)
    assert kept.find("own-0") is None
    assert kept.find("own-1") is second


async def test_only_the_cancellation_of_an_admin_is_taken_back() -> None:
    context = RequestContext("r")

    async def work(started: asyncio.Event) -> bool:
        watched = WatchedRequest(context, _batch(1, "a"))
        seen.append(watched)
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return watched.consume_cancellation()
        return False

    for by_admin in (True, False):
        seen: list[WatchedRequest] = []
        context = dataclasses.replace(context, cancelled=False, left_at=None)
        task = asyncio.create_task(work(started := asyncio.Event()))
        await started.wait()
        if by_admin:
            seen[0].cancel()
            assert seen[0].state == "stopping"
        else:
            task.cancel()
        assert await task is by_admin


def test_refusals_are_counted_by_reason() -> None:
    demand = TenantDemand()
    demand.count_refusal("a", "queue_full")
    demand.count_refusal("a", "requests_per_minute")
    demand.count_refusal("a", "queue_full")
    assert demand.refused == {"a": {"queue_full": 2, "requests_per_minute": 1}}
    assert demand.refusals["a"].why == "queue_full"


def test_a_mistake_of_the_clients_hides_no_other_refusal() -> None:
    demand = TenantDemand()
    demand.count_refusal("a", "model_not_found", mistake=True)
    assert demand.refusals["a"].mistake
    demand.count_refusal("a", "queue_full")
    demand.count_refusal("a", "model_not_found", mistake=True)
    assert (demand.refusals["a"].why, demand.refusals["a"].mistake) == ("queue_full", False)
    assert demand.refused["a"] == {"model_not_found": 2, "queue_full": 1}
