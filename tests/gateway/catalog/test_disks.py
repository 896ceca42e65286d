"""A gateway's view of the disks that agents manage, while agents and Redis fail and return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from redis import Redis

from adapters.errors import StoreUnavailable
from gateway.catalog.disks import AgentDisks
from gateway.catalog.placement import Placement
from lora_store.peft_notices import AgentState, PeftNotices
from tests.support.lora_files import BASE
from tests.support.redis_server import RedisServer

DIGEST, OTHER = "a" * 64, "b" * 64
REPLICA = "triton:8001"


class World:
    """A gateway's view of the disks, with a simulated clock."""

    def __init__(self, server: RedisServer) -> None:
        self.now = 0.0
        self.notices = PeftNotices(server.settings())
        self.placement = Placement()
        self.disks = AgentDisks(self.notices, self.placement, lambda: BASE, lambda: self.now)
        self._beats = 0

    def tell(self, *digests: str, revision: int = 1, boot: str = "one", agent: str = "a") -> None:
        self._beats += 1
        held = AgentState(
            boot=boot,
            revision=revision,
            replicas=(REPLICA,),
            path="/disk",
            holds=frozenset(digests),
        )
        self.notices.put_agent_state(agent, held, str(self._beats))

    async def looks(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            await self.disks.poll()

    def at(self, digest: str = DIGEST, endpoint: str = REPLICA) -> str | None:
        return self.placement.of(digest).at(endpoint)


@pytest.fixture
def world(redis_server: RedisServer) -> Iterator[World]:
    world = World(redis_server)
    with contextlib.closing(world.disks):
        yield world


async def test_it_goes_by_what_agents_tell(world: World) -> None:
    await world.looks()
    assert world.at() is None
    world.tell(DIGEST)
    await world.looks()
    assert world.at() == f"/disk/{DIGEST}"
    for endpoint in (f"grpcs://{REPLICA}", f"grpcs://{REPLICA}#the.name.in.its.certificate"):
        assert world.at(endpoint=endpoint) == f"/disk/{DIGEST}"
    assert world.at(endpoint="other:8001") is None
    assert world.at(OTHER) is None
    world.tell(OTHER, revision=2)
    await world.looks()
    assert (world.at(), world.at(OTHER)) == (None, f"/disk/{OTHER}")
    # A restarted agent counts its revisions from 1 again.
    world.tell(DIGEST, revision=1, boot="two")
    await world.looks()
    assert (world.at(), world.at(OTHER)) == (f"/disk/{DIGEST}", None)


async def test_it_tells_what_it_has_seen_and_what_it_uses(world: World) -> None:
    world.tell(DIGEST, revision=7)
    with world.placement.of(DIGEST).using(f"grpcs://{REPLICA}"):
        await world.looks()
        (named,) = world.notices.read_gateway_states().values()
        assert named.seen == {"a": ("one", 7)}
        assert named.in_use == {DIGEST: {REPLICA}}
    await world.looks()
    (named,) = world.notices.read_gateway_states().values()
    assert named.in_use == {}
    assert world.notices.read_base() == BASE


async def test_an_agent_that_is_silent_for_a_minute_is_gone(world: World) -> None:
    world.tell(DIGEST)
    await world.looks(59)
    assert world.at() is not None
    await world.looks(5)
    assert world.at() is None
    world.tell(DIGEST)
    await world.looks()
    assert world.at() is not None


async def test_a_redis_that_is_away_or_flushed_is_no_agents_fault(
    world: World, redis_server: RedisServer, at_redis: Redis
) -> None:
    world.tell(DIGEST)
    await world.looks()
    at_redis.flushall()
    await world.looks(10)
    assert world.at() is not None
    redis_server.kill()
    for _ in range(3):
        world.now += 3600.0
        with pytest.raises(StoreUnavailable):
            await world.disks.poll()
    assert world.at() is not None
    redis_server.start()
    # Redis is back but empty, because agents have not reported again yet.
    await world.looks(10)
    assert world.at() is not None


async def test_what_does_not_fit_in_redis_is_left_alone(world: World, at_redis: Redis) -> None:
    world.tell(DIGEST)
    await world.looks()
    for raw in (b"{", b"[]", b'{"boot": 1}', b"\xff" * 10):
        at_redis.hset("lora:peft:agents", "strange", raw)
        at_redis.hset("lora:peft:beats", "strange", raw)
        await world.looks()
    wrong = b'{"boot": "b", "revision": 1, "replicas": ["%s"], "path": "%s", "holds": ["%s"], '
    wrong += b'"refused": {}}'
    for path, digest in ((b"etc", DIGEST.encode()), (b"/etc", b"../../x")):
        at_redis.hset("lora:peft:agents", "strange", wrong % (REPLICA.encode(), path, digest))
        await world.looks()
    assert world.at() == f"/disk/{DIGEST}"
    assert world.notices.refusals.count
