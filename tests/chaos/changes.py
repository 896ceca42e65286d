"""Changes of adapters, and load on many adapters, while clients send requests."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

import httpx

from tests.chaos import adapters
from tests.chaos.adapters import LIVE
from tests.chaos.clients import Load
from tests.chaos.gateway import Gateway
from tests.chaos.questions import GENERATED
from tests.chaos.world import TENANTS, World
from tests.support.metrics import sample

# Error code of a change whose outcome is unknown.
_UNKNOWN = "adapter_change_unknown"


async def change(world: World, _: Load) -> None:
    await _change(world, world.chance.choice(world.gateways))


async def change_without_redis(world: World, _: Load) -> None:
    """Change an adapter at one gateway without Redis. The other follows once Redis is back."""
    await _change(world, world.chance.choice(world.gateways), world.redis_dies())


async def change_on_full_disk(world: World, _: Load) -> None:
    gateway = world.chance.choice(world.gateways)
    await _change(world, gateway, gateway.full_disk(world.chance.choice([0, 300])))


async def use_many(world: World, load: Load) -> None:
    """Request all adapters at once, more than the engines' caches hold, and then again."""
    tenants = list(TENANTS)
    for _ in range(2):
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(world.many):
                for gateway in world.gateways:
                    tenant = tenants[number % len(tenants)]
                    group.create_task(load.ask(gateway, name, GENERATED, tenant, 12))
    pages = [await asyncio.to_thread(gateway.metrics_page) for gateway in world.gateways]
    evicted = sum(sample(page, "gateway_lora_cold_sends_total", cause="evicted") for page in pages)
    world.evictions = max(world.evictions, int(evicted))


async def _change(
    world: World, gateway: Gateway, trouble: AbstractAsyncContextManager[None] | None = None
) -> None:
    """Change LIVE. Both gateways must then agree on the reported result."""
    old = world.live.now
    kind, new = _next(world, old)
    world.live.may_be({old, new})
    async with trouble or nullcontext():
        answer = await _ask_for(world, gateway, kind, new)
    said = {new} if answer.is_success else {old}
    if not answer.is_success and answer.json()["error"]["code"] == _UNKNOWN:
        said = {old, new}
    agreed = (await adapters.wait_until_agreed(world.gateways, said)).get(LIVE)
    world.live.may_be({agreed})
    if agreed not in said:
        world.found_wrong(
            f"{kind} of {LIVE} from {old} to {new}: {answer.text}, and it is {agreed}"
        )


def _next(world: World, old: str | None) -> tuple[str, str | None]:
    """Return the next change, and the digest that is served after it."""
    if old is None:
        return "add", world.chance.choice(list(world.digests))
    kind = world.chance.choice(["add", "add", "roll back", "remove"])
    if kind == "remove":
        return kind, None
    return kind, world.chance.choice([digest for digest in world.digests if digest != old])


async def _ask_for(world: World, gateway: Gateway, kind: str, new: str | None) -> httpx.Response:
    if new is None:
        return await adapters.call(gateway, "DELETE", f"/{LIVE}")
    if kind == "roll back":
        known = (await adapters.call(gateway, "GET", f"/{LIVE}")).json()["versions"]
        if new in {version["version"] for version in known}:
            body = {"version": new}
            return await adapters.call(gateway, "POST", f"/{LIVE}/rollback", json=body)
    return await adapters.add(gateway, LIVE, world.contents[world.digests[new]])
