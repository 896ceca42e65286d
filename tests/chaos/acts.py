"""Faults that the chaos run injects. Each returns once the next one can follow."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterable

from tests.chaos import changes, damage
from tests.chaos.clients import Load
from tests.chaos.world import World

Act = Callable[[World, Load], Awaitable[object]]
FROZEN_S = (1.0, 4.0)


async def break_things(world: World, load: Load, seconds: float, names: Iterable[str]) -> None:
    """Inject these faults in random order for `seconds`, each at least once."""
    ends = time.monotonic() + seconds
    left = [name for name in names if name not in world.skipped]
    while time.monotonic() < ends or set(world.done) != set(left):
        for name in world.chance.sample(left, len(left)):
            if time.monotonic() >= ends and name in world.done:
                continue
            print(f"{time.strftime('%X')} {name}", flush=True)
            await ACTS[name](world, load)
            world.done[name] += 1
            await world.revive()
            await asyncio.sleep(world.chance.uniform(0.2, 0.8))


def _kill_triton(index: int) -> Act:
    async def act(world: World, _: Load) -> None:
        replica = world.tritons[index]
        await asyncio.to_thread(replica.kill)
        await asyncio.sleep(world.chance.uniform(0, 2))
        await asyncio.to_thread(replica.start)
        await asyncio.to_thread(replica.wait_ready)

    return act


def _freeze_triton(index: int) -> Act:
    """Freeze a Triton like a paused machine.

    `thaw` resumes its processes one after the other, because Triton may crash otherwise.
    """

    async def act(world: World, _: Load) -> None:
        world.tritons[index].freeze()
        await asyncio.sleep(2 * world.chance.uniform(*FROZEN_S))
        await world.tritons[index].thaw()

    return act


def _kill_worker(index: int) -> Act:
    """Kill a worker process of a gateway, and send SIGHUP while its successor starts."""

    async def act(world: World, _: Load) -> None:
        gateway = world.gateways[index]
        victim = world.chance.choice(gateway.workers())
        with gateway.outage():
            victim.kill()
            await asyncio.sleep(world.chance.uniform(1, 2.5))
            gateway.hang_up()
            await gateway.serves_again()

    return act


async def _freeze_worker(world: World, _: Load) -> None:
    victim = world.chance.choice(world.chance.choice(world.gateways).workers())
    victim.suspend()
    await asyncio.sleep(world.chance.uniform(*FROZEN_S))
    victim.resume()


async def _kill_gateway(world: World, _: Load) -> None:
    gateway = world.chance.choice(world.gateways)
    with gateway.outage():
        await gateway.kill()
        await gateway.start()
        await gateway.serves_again()


async def _hang_up(world: World, _: Load) -> None:
    gateway = world.chance.choice(world.gateways)
    for pause in (0.0, 0.1, world.chance.uniform(0, 0.5)):
        gateway.hang_up()
        await asyncio.sleep(pause)


async def _kill_redis(world: World, _: Load) -> None:
    async with world.redis_dies():
        await asyncio.sleep(world.chance.uniform(0, 3))


async def _freeze_redis(world: World, _: Load) -> None:
    world.redis.signal(signal.SIGSTOP)
    await asyncio.sleep(world.chance.uniform(*FROZEN_S))
    world.redis.signal(signal.SIGCONT)


async def _slow_redis(world: World, _: Load) -> None:
    """Delay each command by up to 0.2 s."""
    for pause in [world.chance.uniform(0.05, 0.2) for each in range(10)]:
        world.redis.signal(signal.SIGSTOP)
        await asyncio.sleep(pause)
        world.redis.signal(signal.SIGCONT)
        await asyncio.sleep(pause)


ACTS: dict[str, Act] = {
    "kill triton 0": _kill_triton(0),
    "kill triton 1": _kill_triton(1),
    "freeze triton 0": _freeze_triton(0),
    "freeze triton 1": _freeze_triton(1),
    "kill a worker of a": _kill_worker(0),
    "kill a worker of b": _kill_worker(1),
    "freeze a worker": _freeze_worker,
    "kill a gateway": _kill_gateway,
    "SIGHUP": _hang_up,
    "kill redis": _kill_redis,
    "freeze redis": _freeze_redis,
    "slow redis": _slow_redis,
    "fill redis": damage.fill_redis,
    "delete weights in redis": damage.delete_weights_in_redis,
    "change weights in redis": damage.change_weights_in_redis,
    "change weights on disk": damage.change_weights_on_disk,
    "cut weights on disk": damage.cut_weights_on_disk,
    "fill a disk": damage.fill_disk,
    "rename a usage log": damage.rename_usage_log,
    "delete a usage log": damage.delete_usage_log,
    "move a wall clock": damage.move_clock,
    "change an adapter": changes.change,
    "change an adapter without redis": changes.change_without_redis,
    "change an adapter on a full disk": changes.change_on_full_disk,
    "use many adapters": changes.use_many,
}
