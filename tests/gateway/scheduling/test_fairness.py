"""A flood of one tenant delays another's requests by no more than its share."""

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
# While a request of the other tenant waits for a place and runs, each place may end one request
# that was there before it, and one that took that one's place. First come, first served it would
# have to let the whole queue pass.
MOST_PASSED = 2 * PLACES


async def test_a_flood_of_one_tenant_is_not_felt_by_another(tmp_path: Path) -> None:
    engine = paced_engine(tmp_path / "engine", tokens_per_second=50, first_token_ms=150)
    log = tmp_path / "usage.jsonl"
    settings = {
        "config": write_config(tmp_path / "c.yaml", *[tenant(*pair) for pair in KEYS.items()]),
        "replica_in_flight": PLACES,
        "queue_timeout": 600,
        "max_expected_wait": 600,
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
            long = body(max_tokens=100, ignore_eos=True)  # 2 s, of 16 at once
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
    """How many requests of the flood ended, by the gateway's clock, while this one was there."""
    return sum(
        waiter["started"] < record["ended"] < waiter["ended"]
        for record in records
        if record["tenant"] == "flood"
    )


async def test_the_higher_priority_goes_first(tmp_path: Path) -> None:
    """Of those that wait for the one place, whoever came first."""
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
        "max_expected_wait": 600,
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
            # Takes the place until it leaves.
            long = body(max_tokens=200, ignore_eos=True, stream=True)
            async with clients["busy"].stream("POST", "/v1/completions", json=long) as running:
                lines = running.aiter_lines()  # kept: its end would close the stream
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
