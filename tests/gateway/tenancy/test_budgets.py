"""Token budgets per day and month, tested through the HTTP API with a real Redis."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from gateway.config.file import Configuration, ConfigurationError
from gateway.config.settings import Settings
from gateway.config.tenants import Tenant
from gateway.errors import InsufficientQuota, LimitsUnavailable, RateLimited
from gateway.tenancy.access import load_configuration_file
from gateway.tenancy.limits.budgets import BudgetUsage
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.reservation import Reservation
from ops.commands.up import DEMO_MODEL
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.limit_requests import PATIENT_S, until
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.redis_server import RedisServer

KEY = "sk-monthly-key"
# Timeout for tests that stop Redis. It is long enough for a running Redis on a busy machine.
LATE_S = 5.0
MANY = 10_000
ACME = Tenant(name="acme", keys=[], models=["*"], tokens_per_day=100, tokens_per_month=150)


def _used(client: Redis, name: str, kind: str) -> int:
    fields: Any = client.hgetall(f"budgets:{{{name}}}")
    return sum(int(value) for field, value in fields.items() if field[:1] == kind.encode())


def _held(client: Redis, name: str) -> int:
    fields: Any = client.hgetall(f"budgets:{{{name}}}")
    return sum(int(value.split()[0]) for field, value in fields.items() if field[:1] == b"h")


def test_two_gateways_spend_a_budget_together(
    stack: Stack, redis_server: RedisServer, at_redis: Redis, tmp_path: Path
) -> None:
    """Two gateways share a budget exactly, and refuse requests once it is spent."""
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY, tokens_per_month=1000))
    common: dict[str, object] = {
        "config": config,
        "redis_url": redis_server.url,
        "redis_timeout": PATIENT_S,
        "admin_port": 0,
    }
    logs = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    # 9 prompt tokens and 16 output tokens
    ask = body(prompt="Count from 1 to 300", ignore_eos=True, max_tokens=16)

    async def ask_all(one: GatewayProcess, two: GatewayProcess) -> list[tuple[int, str]]:
        async with one.async_client(KEY) as first, two.async_client(KEY) as second:
            asked = [client.post("/v1/completions", json=ask) for client in (first, second) * 30]
            answers = await asyncio.gather(*asked)
        return [
            (answer.status_code, (answer.json().get("error") or {}).get("code", ""))
            for answer in answers
        ]

    with (
        GatewayProcess(tmp_path / "1", stack, usage_log=logs[0], **common) as one,
        GatewayProcess(tmp_path / "2", stack, usage_log=logs[1], **common) as two,
    ):
        outcomes = asyncio.run(ask_all(one, two))
        assert outcomes.count((200, "")) == 40
        # While requests run, a refusal says to retry, because they may return reserved tokens.
        assert {code for _, code in outcomes} <= {"", "rate_limit_exceeded", "insufficient_quota"}
        until(lambda: _used(at_redis, "acme", "m") == 1000)
        for gateway in (one, two):
            with gateway.client(KEY) as client:
                answer = client.post("/v1/completions", json=ask)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (429, "insufficient_quota")
            assert "tokens per month: limit 1000, used 1000, requested 25." in error["message"]
            assert error["message"].endswith("-01 00:00:00 UTC.")
            assert answer.headers["x-should-retry"] == "false"
            assert 0 < int(answer.headers["retry-after"]) <= 31 * 86400
        lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        assert sum(line["prompt_tokens"] + line["completion_tokens"] for line in lines) == 1000
        warnings = re.findall(r"acme has used \d+ of 1000 tokens per month", one.text + two.text)
        assert len(warnings) == 1
        for gateway in (one, two):
            page = f"http://127.0.0.1:{gateway.admin_port}/metrics"
            labels = {"tenant": "acme", "limit": "tokens_per_month"}
            assert metric(page, "gateway_tenant_budget_used_tokens", **labels) == 1000
            assert metric(page, "gateway_tenant_budget_tokens", **labels) == 1000
    assert not [name for name in at_redis.hkeys("budgets:{acme}") if name[:1] == b"d"]


async def _let_in(limits: Limits, tokens: int, tenant: Tenant = ACME) -> Reservation:
    reservation = await limits.count(tenant, 1)
    await reservation.reserve(tokens)
    return reservation


async def test_each_token_is_counted_once_though_redis_goes_away(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    standings = BudgetUsage()
    async with SharedLimits(
        redis_server.url, timeout_s=LATE_S, on_budget=standings.update
    ) as shared:
        limits = Limits(shared)
        before = await _let_in(limits, 40)
        redis_server.signal(signal.SIGSTOP)
        # Admitted without being counted. They are counted when Redis answers again.
        meanwhile = [await _let_in(limits, 50) for _ in range(3)]
        assert not shared.up
        before.close(30)
        for one in meanwhile:
            one.close(20)
        redis_server.signal(signal.SIGCONT)
        async with asyncio.timeout(300):
            while standings.used_of("acme", "tokens_per_month") != 90:
                await asyncio.sleep(0.05)
        with pytest.raises(InsufficientQuota, match="per day: limit 100, used 90, requested 11"):
            await _let_in(limits, 11)
        (await _let_in(limits, 10)).close(10)
        async with asyncio.timeout(300):
            while standings.used_of("acme", "tokens_per_month") != 100:
                await asyncio.sleep(0.05)
        assert (_used(at_redis, "acme", "d"), _used(at_redis, "acme", "m")) == (100, 100)
        # An emptied Redis starts to count at zero.
        at_redis.flushall()
        (await _let_in(limits, 10)).close(7)
    assert (_used(at_redis, "acme", "d"), _used(at_redis, "acme", "m")) == (7, 7)


async def test_what_is_spent_while_redis_is_away_is_added_up(redis_server: RedisServer) -> None:
    """Spending during an outage is summed up, as an entry per request would take gigabytes."""
    much = 10**9
    roomy = Tenant(name="acme", keys=[], models=["*"], tokens_per_day=much, tokens_per_month=much)
    standings = BudgetUsage()
    async with SharedLimits(
        redis_server.url, timeout_s=PATIENT_S, on_budget=standings.update
    ) as shared:
        limits = Limits(shared)
        (await _let_in(limits, 40, roomy)).close(40)
        runs = await _let_in(limits, 50, roomy)
        async with asyncio.timeout(300):
            while standings.used_of("acme", "tokens_per_month") != 40:
                await asyncio.sleep(0.05)
        redis_server.kill()  # Redis loses everything it counted
        (await _let_in(limits, 10, roomy)).close(7)
        assert not shared.up
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(MANY):
                (await _let_in(limits, 10, roomy)).close(7)
            async with asyncio.timeout(300):
                while tracemalloc.get_traced_memory()[0] - before > MANY * 20:
                    await asyncio.sleep(0.05)
        finally:
            tracemalloc.stop()
        runs.close(30)
        spent = 7 + 7 * MANY + 30
        redis_server.start()
        with redis_server.client() as client:
            for more in (0, 5):
                async with asyncio.timeout(300):
                    while _used(client, "acme", "d") != spent + more or not shared.up:
                        await asyncio.sleep(0.05)
                (await _let_in(limits, 10, roomy)).close(5)
    with redis_server.client() as client:
        assert (_used(client, "acme", "d"), _used(client, "acme", "m")) == (spent + 10, spent + 10)
        assert _held(client, "acme") == 0


async def test_what_is_known_to_be_used_up_is_refused_while_redis_is_late(
    redis_server: RedisServer,
) -> None:
    standings = BudgetUsage()
    async with SharedLimits(
        redis_server.url, timeout_s=LATE_S, on_budget=standings.update
    ) as shared:
        limits = Limits(shared, standings=standings)
        (await _let_in(limits, 90)).close(90)
        async with asyncio.timeout(300):
            while standings.used_of("acme", "tokens_per_day") != 90:
                await asyncio.sleep(0.05)
        redis_server.signal(signal.SIGSTOP)
        try:
            for _ in range(2):  # the first call finds Redis late, the second one unavailable
                with pytest.raises(InsufficientQuota, match="limit 100, used 90, requested 11"):
                    await _let_in(limits, 11)
            (await _let_in(limits, 10)).close(0)
        finally:
            redis_server.signal(signal.SIGCONT)


async def test_a_budget_that_a_reload_adds_counts_what_older_requests_use(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    before = ACME.model_copy(update={"tokens_per_month": None})
    async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as shared:
        limits = Limits(shared)
        old = await _let_in(limits, 50, before)
        new = await _let_in(limits, 30)
        old.close(50)
        new.close(30)
    assert (_used(at_redis, "acme", "d"), _used(at_redis, "acme", "m")) == (80, 80)


async def test_what_running_requests_hold_may_come_back(redis_server: RedisServer) -> None:
    async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as shared:
        limits = Limits(shared)
        running = await _let_in(limits, 90)
        with pytest.raises(
            RateLimited, match=r"remaining 10, requested 11\..*again in 1s"
        ) as found:
            await _let_in(limits, 11)
        assert not isinstance(found.value, InsufficientQuota)
        with pytest.raises(RateLimited, match="too large for the limit of tokens per day"):
            await _let_in(limits, 101)
        running.close(20)
        (await _let_in(limits, 80)).close(0)


async def test_while_redis_is_away_a_budget_may_refuse() -> None:
    away = {"tokens_per_month": "refuse"}
    async with SharedLimits("unix:///nowhere/redis.sock") as nowhere:
        limits = Limits(nowhere)
        (await _let_in(limits, 1)).close(1)
        limits.update(Configuration.model_validate({"limits": {"when_redis_is_away": away}}))
        with pytest.raises(LimitsUnavailable, match="tokens per month cannot be counted now"):
            await _let_in(limits, 1)


def test_without_redis_there_are_no_budgets(tmp_path: Path) -> None:
    """Budgets without Redis are refused at the start: each process would count from zero."""
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY, tokens_per_day=1))
    settings = Settings(tokenizer_dir=DEMO_MODEL, config=config)
    line = config.read_text().splitlines().index("  tokens_per_day: 1") + 1
    with pytest.raises(ConfigurationError, match="needs GATEWAY_REDIS_URL") as found:
        load_configuration_file(settings)
    assert f"{config}:{line}: tenants[0].tokens_per_day: " in str(found.value)
    load_configuration_file(settings.model_copy(update={"redis_url": "unix:///redis.sock"}))


async def test_what_others_write_into_a_budgets_key_is_left_alone(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    day = int(at_redis.time()[0]) // 86400
    wild = {f"d:{day}": "-7", "d:99999999": "1", "m:x": "1", "h:other": "9 9", "x": "y", "": ""}
    at_redis.hset("budgets:{acme}", mapping=wild)
    refused: list[None] = []
    async with SharedLimits(
        redis_server.url, timeout_s=PATIENT_S, on_refused=lambda: refused.append(None)
    ) as shared:
        limits = Limits(shared)
        for _ in range(2):
            (await _let_in(limits, 20)).close(20)
    kept: Any = at_redis.hgetall("budgets:{acme}")
    assert wild.items() <= {name.decode(): value.decode() for name, value in kept.items()}.items()
    assert _used(at_redis, "acme", "m") == 1 + 40
    assert refused == [None], "counted once"
