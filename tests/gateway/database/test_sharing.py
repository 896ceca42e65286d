"""Gateways that share a Redis: those with databases of their own find each other, and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from gateway.database import sharing as sharing_module
from gateway.database.migrate import read_fact
from gateway.database.opening import make_database
from gateway.database.sharing import DATABASES, SETTING, Sharing
from gateway.errors import SwitchedOff
from gateway.troubles import Troubles
from tests.support.adapter_store import becomes
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer
from tests.support.upgraded_database import create_tables

FEATURE = "Creating keys"
EXPIRED_S = 17  # longer ago than any gateway that is running registers itself


class Gateways:
    """Gateways that share a Redis. Each folder has a database of its own."""

    def __init__(self, folder: Path, redis_url: str | None) -> None:
        self._folder = folder
        self._redis_url = redis_url
        self._ends: dict[Sharing, AsyncExitStack] = {}

    async def start(self, name: str, url: str | None = None, *, ephemeral: bool = False) -> Sharing:
        """Start a gateway with SQLite, or with PostgreSQL if there is a URL."""
        options: dict[str, Any] = {"connections": 1, "timeout_s": PATIENCE_S}
        database = make_database(self._folder / name, url, prepare=create_tables, **options)
        await database.open()
        end = AsyncExitStack()
        end.push_async_callback(database.close)
        sharing = Sharing(database, self._redis_url, ephemeral=ephemeral)
        await end.enter_async_context(sharing)
        self._ends[sharing] = end
        return sharing

    async def end(self, sharing: Sharing) -> None:
        await self._ends.pop(sharing).aclose()

    async def end_all(self) -> None:
        for sharing in tuple(self._ends):
            await self.end(sharing)

    async def identity(self, sharing: Sharing) -> str:
        found: str | None = await sharing._database.read(partial(read_fact, name="identity"))
        assert found is not None
        return found


@pytest.fixture
async def gateways(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Gateways]:
    gateways = Gateways(tmp_path, redis_server.url)
    yield gateways
    await gateways.end_all()


async def _serves(*several: Sharing) -> bool:
    """Let each gateway poll, and return whether all serve or all refuse."""
    found = set()
    for each in several:
        await each.poll()
        found.add(not each.problem)
        if not each.problem:
            each.require(FEATURE)
            continue
        assert SETTING in each.problem
        with pytest.raises(SwitchedOff) as refused:
            each.require(FEATURE)
        assert refused.value.setting == SETTING
        assert refused.value.message.startswith(f"{FEATURE} needs a database")
        assert SETTING in refused.value.message
    [serves] = found
    return serves


async def test_a_gateway_alone_serves(gateways: Gateways, at_redis: Redis) -> None:
    one = await gateways.start("one")
    assert await _serves(one)
    # Nothing stays in Redis for ever if the gateways do not return.
    assert 0 < int(at_redis.ttl(DATABASES)) <= 3600


async def test_two_files_refuse_until_one_gateway_has_ended(
    gateways: Gateways, at_redis: Redis
) -> None:
    one = await gateways.start("one")
    assert await _serves(one)
    two = await gateways.start("two")
    assert two.problem  # from its start on
    assert not await _serves(one, two)
    identity = await gateways.identity(two)
    await gateways.end(two)
    assert not await _serves(one)  # another worker may have the same file
    _set_age(at_redis, identity, 5)
    assert not await _serves(one)
    _set_age(at_redis, identity, EXPIRED_S)
    assert await _serves(one)
    assert at_redis.zcard(DATABASES) == 1


def _set_age(at_redis: Redis, identity: str, seconds: int) -> None:
    """Let a gateway have registered itself some time ago."""
    now, _ = at_redis.time()
    at_redis.zadd(DATABASES, {identity: now - seconds})


async def test_a_gateway_that_was_frozen_counts_again(gateways: Gateways, at_redis: Redis) -> None:
    one, two = await gateways.start("one"), await gateways.start("two")
    _set_age(at_redis, await gateways.identity(two), EXPIRED_S)
    assert await _serves(one)
    assert not await _serves(two, one)


async def test_a_clock_that_is_set_back_keeps_nobody_registered(
    gateways: Gateways, at_redis: Redis
) -> None:
    one, two = await gateways.start("one"), await gateways.start("two")
    _set_age(at_redis, await gateways.identity(two), -3600)
    await gateways.end(two)
    assert await _serves(one)


async def test_processes_with_the_same_file_serve(gateways: Gateways) -> None:
    workers = [await gateways.start("one") for _ in range(3)]
    assert await _serves(*workers)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_file_that_ends_with_its_gateway_refuses(
    gateways: Gateways, postgresql_url: str, is_shared: bool
) -> None:
    url = postgresql_url if is_shared else None
    one = await gateways.start("one", url, ephemeral=True)
    if is_shared:
        one.require(FEATURE)
        return
    with pytest.raises(SwitchedOff, match=f"{FEATURE} needs a database .*{SETTING}"):
        one.require(FEATURE)


async def test_postgresql_never_refuses(gateways: Gateways, postgresql_url: str) -> None:
    fleet = [await gateways.start("", postgresql_url) for _ in range(2)]
    assert await _serves(*fleet)
    alone = await gateways.start("alone")
    assert not await _serves(alone)
    assert await _serves(*fleet)


async def test_the_last_state_stays_without_redis(
    gateways: Gateways, redis_server: RedisServer
) -> None:
    one = await gateways.start("one")
    redis_server.kill()
    assert await _serves(one)
    redis_server.start()
    two = await gateways.start("two")
    assert not await _serves(one, two)
    redis_server.kill()
    assert not await _serves(one, two)
    await gateways.end(two)
    assert not await _serves(one)
    redis_server.start()  # without data
    assert await _serves(one)


async def test_a_redis_that_does_not_answer_holds_up_nothing(
    gateways: Gateways, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "_TIMEOUT_S", 0.1)
    redis_server.kill()
    with redis_server.silent():
        one = await asyncio.wait_for(gateways.start("one"), PATIENCE_S)
        assert await asyncio.wait_for(_serves(one), PATIENCE_S)
        await asyncio.wait_for(gateways.end(one), PATIENCE_S)


async def test_a_key_of_another_type_in_redis(gateways: Gateways, at_redis: Redis) -> None:
    at_redis.set(DATABASES, "not a sorted set")
    one = await gateways.start("one")
    assert await _serves(one)
    at_redis.delete(DATABASES)
    await gateways.start("two")
    assert not await _serves(one)


async def test_a_database_that_is_available_later(gateways: Gateways, tmp_path: Path) -> None:
    one = await gateways.start("one")
    (tmp_path / "two").touch()  # not a folder
    two = await gateways.start("two")
    assert await _serves(one, two)
    (tmp_path / "two").unlink()
    assert not await _serves(two, one)


async def test_followers_find_out_by_themselves(
    gateways: Gateways, at_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "_POLL_INTERVAL_S", 0.01)
    one = await gateways.start("one")
    troubles = Troubles()
    following = asyncio.create_task(one.follow(troubles))
    two = await gateways.start("two")
    await becomes(lambda: one.problem)
    identity = await gateways.identity(two)
    await gateways.end(two)
    _set_age(at_redis, identity, EXPIRED_S)
    await becomes(lambda: not one.problem)
    assert not troubles.facts()
    following.cancel()


async def test_without_redis_all_is_served(tmp_path: Path) -> None:
    gateways = Gateways(tmp_path, None)
    one = await gateways.start("one")
    assert await _serves(one)
    await one.follow(Troubles())  # ends at once
    await gateways.end_all()
