"""Delay of a tenant's requests by another tenant's flood, and by requests of higher priority."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import paced_engine, tritons
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.metrics import sample

pytestmark = pytest.mark.slow

FLOOD, SAMPLES, PLACES = 500, 20, 16
KEYS = {"flood": "sk-flood-key", "small": "sk-small-key"}
# Upper bound of the flood's requests that may end while a request of the other tenant waits and
# runs: two per slot, the request that was there and the one after it. A first-come-first-served
# queue would exceed the bound.
MOST_PASSED = 2 * PLACES


async def test_a_flood_of_one_tenant_is_not_felt_by_another(tmp_path: Path) -> None:
    engine = paced_engine(tmp_path / "engine", tokens_per_second=50, first_token_ms=150)
    log = tmp_path / "usage.jsonl"
    settings = {
        "config": write_config(tmp_path / "c.yaml", *[tenant(*pair) for pair in KEYS.items()]),
        "replica_in_flight": PLACES,
        "queue_timeout": 600,
        "refuse_early": False,  # all of the flood waits
        "header_timeout": 600,  # this process may be slow to open so many connections
        "usage_log": log,
        "admin_port": 0,
    }
    with (
        tritons(tmp_path, engine, 1) as one,
        GatewayProcess(tmp_path / "g", one, **settings) as gateway,
    ):
        metrics = f"http://127.0.0.1:{gateway.admin_port}/metrics"
        async with (
            gateway.async_client(KEYS["flood"]) as flood,
            gateway.async_client(KEYS["small"]) as small,
            asyncio.timeout(600),
        ):
            long = body(max_tokens=100, ignore_eos=True)  # takes 2 s with 16 requests at once
            statuses: set[int] = set()

            async def ask_for_ever() -> None:
                while True:
                    answer = await flood.post("/v1/completions", json=long, timeout=600)
                    statuses.add(answer.status_code)

            many = [asyncio.create_task(ask_for_ever()) for _ in range(FLOOD)]
            while await _waiting(small, metrics) < FLOOD / 2:
                await asyncio.sleep(0.05)
            for _ in range(SAMPLES):
                answer = await small.post("/v1/completions", json=body(max_tokens=3))
                assert answer.status_code == 200
            assert await _waiting(small, metrics) > FLOOD / 4
            for task in many:
                task.cancel()
            ends = await asyncio.gather(*many, return_exceptions=True)
    assert {type(end) for end in ends} == {asyncio.CancelledError}
    assert statuses == {200}
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    passed = [_passed(records, record) for record in records if record["tenant"] == "small"]
    assert len(passed) == SAMPLES
    assert max(passed) <= MOST_PASSED, passed


async def _waiting(client: httpx.AsyncClient, metrics: str) -> float:
    return sample((await client.get(metrics)).text, "gateway_requests_waiting")


def _passed(records: list[dict[str, Any]], waiter: dict[str, Any]) -> int:
    """Return how many flood requests ended while `waiter` waited or ran, by the gateway's clock."""
    return sum(
        waiter["started"] < record["ended"] < waiter["ended"]
        for record in records
        if record["tenant"] == "flood"
    )


async def test_the_higher_priority_goes_first(tmp_path: Path) -> None:
    """Requests that wait for the only slot run by priority, not by arrival."""
    engine = paced_engine(tmp_path / "engine", tokens_per_second=2, first_token_ms=1)
    log = tmp_path / "usage.jsonl"
    priorities = {"busy": 0, "batch": -5, "usual": 0, "urgent": 10}
    tenants = [
        tenant(name, f"sk-{name}-key", priority=priority) for name, priority in priorities.items()
    ]
    settings = {
        "config": write_config(tmp_path / "c.yaml", *tenants),
        "max_in_flight": 1,
        "queue_timeout": 600,
        "refuse_early": False,  # all of the flood waits
        "usage_log": log,
        "admin_port": 0,
    }
    with (
        tritons(tmp_path, engine, 1) as one,
        GatewayProcess(tmp_path / "g", one, **settings) as gateway,
    ):
        metrics = f"http://127.0.0.1:{gateway.admin_port}/metrics"
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(600):
            clients = {
                name: await stack.enter_async_context(gateway.async_client(f"sk-{name}-key"))
                for name in priorities
            }
            # This request holds the slot until its client closes the stream.
            long = body(max_tokens=200, ignore_eos=True, stream=True)
            async with clients["busy"].stream("POST", "/v1/completions", json=long) as running:
                # keep a reference: deleting the generator closes the stream
                lines = running.aiter_lines()
                await anext(lines)
                waiting = []
                for name in ("batch", "usual", "urgent"):
                    waiting.append(
                        asyncio.create_task(clients[name].post("/v1/completions", json=body()))
                    )
                    while await _waiting(clients["busy"], metrics) < len(waiting):
                        await asyncio.sleep(0.05)
            answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    ended = [record["tenant"] for record in sorted(records, key=lambda record: record["ended"])]
    assert ended == ["busy", "urgent", "usual", "batch"]
