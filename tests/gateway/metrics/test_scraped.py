"""Metrics whose values are read at the moment of a scrape."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from gateway.config.file import ConfigurationFile
from gateway.conversations.stats import ConversationStats
from gateway.metrics.scraped import BudgetCollector, ConversationsCollector
from gateway.scheduling.discovery import DEFAULT_WEIGHT
from gateway.tenancy.limits.budgets import BudgetReport, BudgetUsage
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer


def _samples(registry: CollectorRegistry) -> set[str]:
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_conversations() -> None:
    registry = CollectorRegistry()
    registry.register(
        ConversationsCollector(
            ConversationStats(
                bytes=10, records=2, evicted=3, disk_failures=4, redis_failures=5, refused_values=6
            )
        )
    )
    assert _samples(registry) == {
        "gateway_conversations_bytes 10.0",
        "gateway_conversations_records 2.0",
        "gateway_conversations_evicted_total 3.0",
        'gateway_conversations_failures_total{of="disk"} 4.0',
        'gateway_conversations_failures_total{of="redis"} 5.0',
        'gateway_conversations_failures_total{of="value"} 6.0',
    }


def test_budgets_and_what_is_known_to_be_used_of_them(tmp_path: Path) -> None:
    budgets: dict[str, Any] = {"tokens_per_day": 100, "tokens_per_month": 1000}
    config = write_config(
        tmp_path / "c.yaml", tenant("a", "sk-key-of-a", **budgets), tenant("b", "sk-key-of-b")
    )
    standings, registry = BudgetUsage(), CollectorRegistry()
    standings.update(BudgetReport("a", "tokens_per_month", 1000, 70, 5, 60_000, 0))
    standings.update(BudgetReport("a", "tokens_per_day", 100, 70, 5, 0, 0))  # of a day that is over
    registry.register(BudgetCollector(ConfigurationFile(config), standings))
    budget, used = "gateway_tenant_budget_tokens", "gateway_tenant_budget_used_tokens"
    assert _samples(registry) == {
        f'{budget}{{limit="tokens_per_day",tenant="a"}} 100.0',
        f'{budget}{{limit="tokens_per_month",tenant="a"}} 1000.0',
        f'{used}{{limit="tokens_per_month",tenant="a"}} 70.0',
    }


async def test_the_load_and_the_state_of_a_replica(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    engine = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault="slow", step=0)
    wanted = {"model": "m", "prompt": "xyz", "max_tokens": 5}
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, max_in_flight=1) as (client, service, _),
        asyncio.timeout(300),
    ):

        def of_replica(name: str) -> float:
            return metric_of(service, f"gateway_replica_{name}", replica=endpoint)

        asked = [asyncio.create_task(client.post("/v1/completions", json=wanted)) for _ in "123"]
        while not engine.requests or service.admission.waiting < 2:
            await asyncio.sleep(0.01)
        assert metric_of(service, "gateway_places_taken") == 1
        assert metric_of(service, "gateway_requests_waiting") == 2
        names = ("ready", "failing", "in_flight", "weight", "requests_total")
        assert [of_replica(name) for name in names] == [1, 0, 1, DEFAULT_WEIGHT, 1]
        engine.fault = None
        engine.released.set()
        await asyncio.gather(*asked)
        assert metric_of(service, "gateway_requests_waiting") == 0
        assert [of_replica(name) for name in names] == [1, 0, 0, DEFAULT_WEIGHT, 3]
        page = (await client.get("/metrics")).text
    store = "gateway_adapter_store_"
    kinds = dict(
        line.split()[2:] for line in page.splitlines() if line.startswith(f"# TYPE {store}")
    )
    states = {name for name, kind in kinds.items() if kind == "gauge"}
    assert states == {store + name for name in ("redis_up", "memory_bytes", "unsent", "unwritten")}
    assert {name for name in kinds if name.endswith("_total")} == kinds.keys() - states
