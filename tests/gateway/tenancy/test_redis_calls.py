"""Redis calls for the former state, agents and limits: none blocks Redis for long."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import redis

from gateway.former_state import keys as former_keys
from gateway.former_state import overrides as former_overrides
from gateway.overrides.rows import MAX_OVERRIDES
from gateway.scheduling.override import Override
from gateway.tenancy.keys.record import KeyRecord, make_record
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import Settlement
from lora_store.peft_notices import AgentState, GatewayState, PeftNotices
from lora_store.redis import RedisSettings
from tests.support.limit_requests import PATIENT_S, limit_request
from tests.support.redis_cost import MAX_CALL_US, longest_call_us, measure_calls
from tests.support.redis_server import RedisServer

_KEYS = 25_000
_PROCESSES = 256


def _nothing(run: int) -> None:
    pass


def test_keys_of_the_former_state(at_shared_redis: redis.Redis, tmp_path: Path) -> None:
    """Measure a large number of keys, which each process reads at its start."""
    one, _ = make_record("acme", "n" * 64, None, "sha256:01234567")
    records = {record.id: record for record in (_numbered(one, number) for number in range(_KEYS))}
    uses = dict.fromkeys(records, 1_800_000_000)
    stored = {key_id: record.model_dump_json() for key_id, record in records.items()}
    at_shared_redis.hset(former_keys.KEYS, mapping={**stored, "@revision": "0123456789abcdef"})
    at_shared_redis.hset(former_keys.USED, mapping=uses)  # type: ignore[arg-type]

    def work(run: int) -> None:
        found = former_keys.read_keys(tmp_path, at_shared_redis)
        assert (found.records, found.uses, found.problems) == (records, uses, [])

    assert longest_call_us(at_shared_redis, _nothing, work) < MAX_CALL_US


def _numbered(one: KeyRecord, number: int) -> KeyRecord:
    return one.model_copy(update={"hash": f"sha256:{number:024x}{'0' * 40}"})


def test_overrides_of_the_former_state(at_shared_redis: redis.Redis, tmp_path: Path) -> None:
    """Measure the maximum number of overrides."""
    overrides = {f"triton-{n}.example:8001": Override(weight=2.0) for n in range(MAX_OVERRIDES)}
    stored = {name: json.dumps(each.to_dict()) for name, each in overrides.items()}
    at_shared_redis.hset(former_overrides.KEY, mapping={**stored, "@revision": "0"})

    def work(run: int) -> None:
        assert former_overrides.read_overrides(tmp_path, at_shared_redis) == (overrides, [])

    assert longest_call_us(at_shared_redis, _nothing, work) < MAX_CALL_US


def test_notices_of_agents(shared_redis: RedisServer, at_shared_redis: redis.Redis) -> None:
    """Measure 40 agents with 5,000 versions each, and 200 gateways that use 200 versions each."""
    notices = PeftNotices(RedisSettings(shared_redis.url, timeout_s=30))
    holds = frozenset(f"{n:064x}" for n in range(5_000))
    held = AgentState(boot="b", revision=1, replicas=("triton:8001",), path="/peft", holds=holds)
    in_use = {f"{n:064x}": frozenset(["triton:8001"]) for n in range(200)}

    def work(run: int) -> None:
        for n in range(40):
            notices.put_agent_state(f"agent-{n}", replace(held, revision=run), f"{run}")
        for n in range(200):
            notices.put_gateway_state(
                f"gateway-{n}", GatewayState(beat=run, seen={}, in_use=in_use)
            )
        assert len(notices.read_beats()) == 40
        assert notices.read_agent_state("agent-1") == replace(held, revision=run)
        assert len(notices.read_gateway_states()) == 200

    assert longest_call_us(at_shared_redis, _nothing, work) < MAX_CALL_US
    notices.close()


async def test_limits(redis_server: RedisServer, at_redis: redis.Redis) -> None:
    """Measure a tenant with counts in each second of a minute, and leases of many processes."""
    now = int(time.time())
    end = (now + 3600) * 1000
    seconds = {f"{kind}:{now - ago}": 5 for kind in "rt" for ago in range(60)}
    leases = {
        f"g:{process:016x}": f"{end} 1 5 50 1 2 20 1 900 9000" for process in range(_PROCESSES)
    }
    budgets = {f"h:{process:016x}": f"5 {end} 9" for process in range(_PROCESSES)}
    at_redis.hset("limits:{t}", mapping={**seconds, **leases})
    at_redis.hset("budgets:{t}", mapping=budgets)
    request = limit_request(
        "t", requests=10**6, tokens=10**6, concurrent=10**4, day=10**9, wanted=9
    )
    unfit_keys: list[None] = []
    costs = []
    for _ in range(3):
        with measure_calls(at_redis) as calls:
            async with SharedLimits(
                redis_server.url, timeout_s=PATIENT_S, on_refused=lambda: unfit_keys.append(None)
            ) as limits:
                decision = await limits.take(request)
                assert decision is not None
                assert decision.refused is None
                assert decision.quotas["requests_per_minute"].used > 5 * _PROCESSES
                limits.settle(Settlement(request, released=9, used=5, slots=1))
        costs.append(max(calls))
    assert min(costs) < MAX_CALL_US
    assert not unfit_keys
