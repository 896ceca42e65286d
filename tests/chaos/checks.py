"""Checks after the run: usage logs, limits, slots, and that no work is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos import adapters
from tests.chaos.acts import FROZEN_S
from tests.chaos.clients import ObservedRequest
from tests.chaos.gateway import WORKERS, Gateway
from tests.chaos.questions import SHORT
from tests.chaos.world import (
    CONCURRENT,
    REQUESTS_PER_MINUTE,
    TENANTS,
    TIGHT,
    TOKENS_PER_MINUTE,
    World,
)

_SETTLED_WITHIN_S = 120.0
# Added to the gateway's deadline: a worker may be frozen when the deadline expires, and a busy
# machine may delay it further.
_LATE_S = FROZEN_S[1] + 20
_WINDOW_S = 60.0
_BUSY = (
    "gateway_places_taken",
    "gateway_requests_waiting",
    "gateway_generations_in_flight",
    "gateway_replica_in_flight",
    "gateway_replica_failing",
    "gateway_adapter_store_unsent",
    "gateway_adapter_store_unwritten",
)


async def settle(world: World) -> None:
    """Wait until all replicas serve at all workers, and no request is running or queued."""
    workers = WORKERS * len(world.gateways)
    whole = {
        "gateway_replica_ready": workers * len(world.tritons.replicas),
        "gateway_limits_shared": workers,
        "gateway_adapter_store_redis_up": workers,
    }
    deadline = time.monotonic() + _SETTLED_WITHIN_S
    while True:
        await world.revive()
        found = await asyncio.to_thread(world.metrics)
        owed = {name: found[name] for name in _BUSY if found[name]}
        owed |= {name: found[name] for name, wanted in whole.items() if found[name] < wanted}
        if not owed:
            break
        assert time.monotonic() < deadline, f"it does not come to rest: {owed}"
        await asyncio.sleep(0.2)
    world.tritons.wait_idle()


async def check_complete(world: World) -> None:
    """Check that all tenants' slots are free, and that each gateway can verify all adapters."""
    deadline = time.monotonic() + _SETTLED_WITHIN_S
    while left_out := await _count_refused(world):
        if time.monotonic() > deadline:
            world.found_wrong(f"{left_out} requests find no place at an idle gateway")
            break
        await asyncio.sleep(2)
    for gateway in world.gateways:
        for name in [name for name in world.fixed if name != "demo"]:
            answer = await adapters.call(gateway, "POST", f"/{name}/verify")
            if not answer.is_success:
                world.found_wrong(f"{name} at {gateway.name}: {answer.text}")


async def _count_refused(world: World) -> int:
    """Send each tenant's maximum of concurrent requests. Return the number of refused ones."""
    statuses: list[int] = []
    body = SHORT.body("demo", stream=False)
    for number, key in enumerate(TENANTS.values()):
        gateway = world.gateways[number % len(world.gateways)]
        async with gateway.process.async_client(key) as client:
            answers = [client.post(SHORT.path, json=body) for _ in range(CONCURRENT)]
            statuses += [answer.status_code for answer in await asyncio.gather(*answers)]
    return sum(status != 200 for status in statuses)


@dataclass
class Bills:
    """A gateway's usage log compared with its clients' view. `wrong` lists the differences."""

    lines: int = 0
    missing: int = 0
    doubled: int = 0
    wrong: list[str] = field(default_factory=list)


def check_bills(gateway: Gateway, seen: Sequence[ObservedRequest]) -> Bills:
    found: dict[str, dict[str, Any]] = {}
    bills = Bills()
    mine = {each.request_id: each for each in seen if each.gateway is gateway}
    for record in _lines(gateway, bills):
        bills.lines += 1
        request_id = record["request_id"]
        if request_id in found:
            bills.doubled += 1
        found[request_id] = record
    for request_id, each in mine.items():
        answered = each.begun and not gateway.was_out(each.started, each.ended)
        if request_id in found:
            bills.wrong += [
                f"{request_id}: {text}" for text in _differences(each, found[request_id])
            ]
        elif each.usage is not None or answered:
            bills.missing += 1
    return bills


def _lines(gateway: Gateway, bills: Bills) -> Iterator[dict[str, Any]]:
    ids: set[str] = set()
    for lines, deleted in gateway.records():
        for record in lines:
            # A deleted file's records may be in the next file too.
            if record["id"] not in ids:
                ids.add(record["id"])
                yield record
            elif not deleted:
                bills.doubled += 1


def _differences(seen: ObservedRequest, record: dict[str, Any]) -> Iterator[str]:
    took_s = record["ended"] - record["started"]
    if record["tenant"] != seen.tenant:
        yield f"the line is of {record['tenant']}, not of {seen.tenant}"
    if not 0 <= took_s < seen.deadline_s + _LATE_S:
        yield f"it took {took_s:.1f} s by the log, {seen.took_s:.1f} s here, {seen.outcome}"
    if seen.usage is not None:
        for kind in ("prompt_tokens", "completion_tokens"):
            if record[kind] != seen.usage[kind]:
                yield f"{kind}: {record[kind]} in the log, {seen.usage[kind]} in the answer"
    # A client may disconnect, or be cut off, at the moment when the complete answer is sent.
    answered = seen.outcome in ("right", "wrong")
    if answered != (record["status"] == 200) and seen.outcome not in ("left", "cut"):
        yield f"{record['status']} in the log, {seen.outcome} here"


def peak_per_minute(world: World, seen: Sequence[ObservedRequest]) -> tuple[int, int]:
    """Return the tight tenant's most requests and tokens within 60 s without a loss of Redis.

    Only requests that started and ended in that window count, so at least these were admitted.
    """
    mine = [each for each in seen if each.tenant == TIGHT and each.usage is not None]
    requests = tokens = 0
    for first in mine:
        ends = first.started + _WINDOW_S
        ends = min([ends, *(died for died, _ in world.redis_lost if died > first.started)])
        within = [e for e in mine if first.started <= e.started and e.ended <= ends]
        requests = max(requests, len(within))
        used = [each.usage["total_tokens"] for each in within if each.usage is not None]
        tokens = max(tokens, sum(used))
    return requests, tokens


def limits_exceeded(requests: int, tokens: int) -> bool:
    return requests > REQUESTS_PER_MINUTE or tokens > TOKENS_PER_MINUTE
