"""Damage to stored data: weights on disks and in Redis, full disks, usage logs, clocks."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import redis

from tests.chaos import adapters
from tests.chaos.changes import use_many
from tests.chaos.clients import Load
from tests.chaos.gateway import WORKERS, Gateway
from tests.chaos.world import World
from tests.support.adapter_store import overwrite

_FULL_S = (1.0, 4.0)
_WEIGHTS = "lora:demo:version:*"
_MOVED_S = (-3 * 3600, -90, 90, 3 * 3600)
_ABOUT_S = 30.0


async def fill_redis(world: World, _: Load) -> None:
    """Fill Redis, which then answers but refuses writes."""
    with world.redis.client() as client:
        client.config_set("maxmemory", "1")
        await asyncio.sleep(world.chance.uniform(*_FULL_S))
        client.config_set("maxmemory", "0")


async def delete_weights_in_redis(world: World, _: Load) -> None:
    """Delete some of the weights' keys, as a full Redis evicts them."""
    with world.redis.client() as client:
        for key in client.keys(_WEIGHTS):
            if world.chance.random() < 0.7:
                client.delete(key)


async def change_weights_in_redis(world: World, load: Load) -> None:
    """Corrupt weights in Redis and delete one gateway's copy. The other gateway has a good one."""
    gateway, name = _one_of(world)
    digest, path = await _on_disk(gateway, name)
    with world.redis.client() as client:
        _overwrite_in(client, f"lora:demo:version:{digest}:0")
    path.unlink(missing_ok=True)
    await _must_mend(world, load, gateway, name)


async def change_weights_on_disk(world: World, load: Load) -> None:
    gateway, name = _one_of(world)
    _, path = await _on_disk(gateway, name)
    overwrite(path)
    await _must_mend(world, load, gateway, name)


async def cut_weights_on_disk(world: World, load: Load) -> None:
    gateway, name = _one_of(world)
    _, path = await _on_disk(gateway, name)
    os.truncate(path, world.chance.randrange(path.stat().st_size))
    await _must_mend(world, load, gateway, name)


async def fill_disk(world: World, _: Load) -> None:
    """Fill a gateway's disk: its files cannot exceed the usage log's size plus up to 400 bytes.

    The limit may cut a line of the usage log.
    """
    gateway = world.chance.choice(world.gateways)
    async with gateway.full_disk(world.chance.choice([0, world.chance.randrange(400)])):
        await asyncio.sleep(world.chance.uniform(*_FULL_S))


async def rename_usage_log(world: World, _: Load) -> None:
    gateway = world.chance.choice(world.gateways)
    gateway.rename_log()
    if world.chance.random() < 0.5:
        gateway.hang_up()


async def delete_usage_log(world: World, _: Load) -> None:
    await world.chance.choice(world.gateways).delete_log()


async def move_clock(world: World, _: Load) -> None:
    """Shift the clock of all processes of one gateway."""
    gateway = world.chance.choice(world.gateways)
    seconds = world.chance.choice(_MOVED_S)
    gateway.clock.move(seconds)
    # This metric is the time of its collection, summed over the workers.
    read = await asyncio.to_thread(gateway.metrics)
    moved = read["lora_requests_info"] / WORKERS - time.time()
    assert abs(moved - seconds) < _ABOUT_S, f"the clock was moved by {moved:.0f}, not {seconds} s"
    await asyncio.sleep(world.chance.uniform(*_FULL_S))
    gateway.clock.move(0)


def _one_of(world: World) -> tuple[Gateway, str]:
    """Return a random gateway, and the name of an adapter that clients use."""
    names = [name for name in world.fixed if name != "demo"]
    return world.chance.choice(world.gateways), world.chance.choice(names)


async def _on_disk(gateway: Gateway, name: str) -> tuple[str, Path]:
    """Return the full digest that a name serves, and the file of the gateway's copy."""
    record = (await adapters.call(gateway, "GET", f"/{name}")).json()
    [digest] = [v["digest"] for v in record["versions"] if v["version"] == record["served"]]
    return digest, gateway.store / "versions" / digest[:2] / f"{digest}.lora"


def _overwrite_in(client: redis.Redis, key: str) -> None:
    """Corrupt the last bytes of a Redis value, if it exists."""
    value = client.get(key)
    if isinstance(value, bytes):
        client.set(key, value[:-64] + bytes(byte ^ 0x55 for byte in value[-64:]))


async def _must_mend(world: World, load: Load, gateway: Gateway, name: str) -> None:
    """Make engines evict the adapter, so that it is loaded again. Then verify it as an admin."""
    await use_many(world, load)
    answer = await adapters.call(gateway, "POST", f"/{name}/verify")
    if not answer.is_success:
        world.found_wrong(f"{name} at {gateway.name} was not mended: {answer.text}")
