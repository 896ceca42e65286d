"""Gateways whose disks are deleted when they end, at one real Redis.

No gateway waits for one that said goodbye. No gateway returns incomplete data because records were
only on a deleted disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from gateway.conversations import shared as shared_module
from gateway.conversations import upkeep as upkeep_module
from gateway.conversations.record import FINAL, Record
from gateway.conversations.store import Conversations
from gateway.errors import ConversationsUnavailable
from tests.support.conversations import GATEWAYS, following, until
from tests.support.examples import scale_examples
from tests.support.redis_server import RedisServer

T = TypeVar("T")

_LOST, _LEFT = "conversations:{all}:lost", "conversations:{all}:left"
_PATIENCE_S = 60  # longer than any pause of a process on a busy machine


async def _patiently(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Call `ask` again until it succeeds, as a client does after a 503."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            with contextlib.suppress(ConversationsUnavailable):
                return await ask()
            await asyncio.sleep(0.05)


def _number(at_redis: redis.Redis, key: str) -> int:
    return int(at_redis.get(key) or 0)


def _item(conversation: str, place: int) -> Record:
    return Record(f"{conversation}/{place}", b"x", FINAL, conversation, place)


async def test_after_a_rollout_and_a_flush_nothing_is_waited_for_and_nothing_is_short(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    url = redis_server.url
    async with AsyncExitStack() as new, AsyncExitStack() as old:
        one = await old.enter_async_context(following(tmp_path / "1", url, ephemeral=True))
        two = await old.enter_async_context(following(tmp_path / "2", url, ephemeral=True))
        head = Record("conv_1", b"head", order=one.redis_time_ms)
        await one.put("t", [head, _item("conv_1", 0)])
        await two.put("t", [_item("conv_1", 1)])
        running = Record("resp_3", b"half", 1, order=one.redis_time_ms)
        await one.put("t", [running])
        for id_ in ("resp_1", "resp_2"):
            await one.put("t", [Record(id_, b"x", FINAL)])
        three = await new.enter_async_context(following(tmp_path / "3", url, ephemeral=True))
        # Gateway three copies an item of conv_1, an unfinished version of resp_3, and resp_2.
        assert await _patiently(lambda: three.get("t", ["conv_1", "resp_3"])) == [head, running]
        assert await three.members("t", "conv_1", limit=1) == [_item("conv_1", 0)]
        assert None not in await three.get("t", ["resp_2"])
        await two.put("t", [_item("conv_1", 2), running._replace(data=b"whole", version=FINAL)])
        await old.aclose()
        assert len(at_redis.hkeys(GATEWAYS)) == 1
        # All items are found as long as Redis has them, although their gateways have ended.
        assert len(await three.members("t", "conv_1")) == 3
        await until(lambda: three.redis_time_ms > _number(at_redis, _LEFT) > 0)
        fresh = Record("conv_2", b"head", order=three.redis_time_ms)
        await three.put("t", [fresh, _item("conv_2", 0)])
        ids = ["conv_1", "conv_2", "resp_1", "resp_2", "resp_3"]
        for _ in range(2):  # the second flush gives the same result
            at_redis.flushall()
            found = await _patiently(lambda: three.get("t", ids))
            assert found == [None, fresh, None, Record("resp_2", b"x", FINAL), None]
            assert await three.members("t", "conv_2") == [_item("conv_2", 0)]
            with pytest.raises(ConversationsUnavailable):
                await three.members("t", "conv_1")
        # The items that are left can be listed, so that a client can delete the conversation.
        assert await three.members("t", "conv_1", require_complete=False)


async def test_a_redis_that_is_emptied_at_once_does_not_bring_back_one_that_has_gone(
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upkeep_module, "GOODBYE_TIMEOUT_S", 2 * _PATIENCE_S)
    monkeypatch.setattr(upkeep_module, "GOODBYE_SEEN_TIMEOUT_S", _PATIENCE_S)
    url = redis_server.url
    async with following(tmp_path / "2", url, ephemeral=True) as two:
        async with following(tmp_path / "1", url, ephemeral=True):
            await until(lambda: at_redis.hlen(GATEWAYS) == 2)
            before = two.redis_time_ms
            # it has polled, so it knows both gateways
            await until(lambda: two.redis_time_ms > before)
        at_redis.flushall()
        assert await _patiently(lambda: two.get("t", ["resp_1"])) == [None]
        assert at_redis.hlen(GATEWAYS) == 1


async def test_one_that_comes_later_learns_what_may_be_short(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    """A gateway reports another gateway's goodbye to a Redis that has lost it."""
    url = redis_server.url
    async with following(tmp_path / "2", url, ephemeral=True) as two:
        async with following(tmp_path / "1", url, ephemeral=True) as one:
            await one.put(
                "t", [Record("conv_1", b"head", order=one.redis_time_ms), _item("conv_1", 0)]
            )
            await _patiently(lambda: two.get("t", ["conv_1"]))
        await until(lambda: two.redis_time_ms > _number(at_redis, _LEFT) > 0)
        left = _number(at_redis, _LEFT)
    # The second gateway ends too, but starts again with its disk, as after a restart of its
    # container.
    at_redis.flushall()
    async with (
        following(tmp_path / "2", url, ephemeral=True) as two,
        following(tmp_path / "3", url, ephemeral=True) as three,
    ):
        assert _number(at_redis, _LOST) >= left
        for store in (two, three):
            assert await _patiently(lambda store=store: store.get("t", ["conv_1"])) == [None]


async def test_what_redis_lost_with_a_goodbye_is_not_read_short(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    """A conversation is reported as unavailable, not as shorter, if Redis lost its last writes.

    The lost writes are a goodbye, and an item written before it.
    """
    url = redis_server.url
    async with following(tmp_path / "2", url, ephemeral=True) as two:
        async with following(tmp_path / "1", url, ephemeral=True) as one:
            await one.put(
                "t", [Record("conv_1", b"head", order=one.redis_time_ms), _item("conv_1", 0)]
            )
            assert len(await _patiently(lambda: two.members("t", "conv_1"))) == 1
            at_redis.save()
            await one.put("t", [_item("conv_1", 1)])
        await until(lambda: two.redis_time_ms > _number(at_redis, _LEFT) > 0)
        epoch = at_redis.get("conversations:{all}:epoch")
        redis_server.kill()
        redis_server.start()
        await until(lambda: at_redis.get("conversations:{all}:epoch") != epoch)
        with pytest.raises(ConversationsUnavailable):
            await two.members("t", "conv_1")
        # Redis lists the gateway again. Pretend that it last polled more than an hour ago.
        [gone] = [name for name in at_redis.hkeys(GATEWAYS) if name.endswith(b"/1")]
        at_redis.hset(GATEWAYS, gone, b"1 1")
        assert await _patiently(lambda: two.get("t", ["conv_1"])) == [None]


async def test_one_that_dies_is_waited_for(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    url = redis_server.url
    async with following(tmp_path / "2", url, ephemeral=True) as two:
        async with following(tmp_path / "1", url, ephemeral=True) as one:
            await one.put(
                "t", [Record("conv_1", b"head", order=one.redis_time_ms), _item("conv_1", 0)]
            )
            await _patiently(lambda: two.get("t", ["conv_1"]))
            [died] = [name for name in at_redis.hkeys(GATEWAYS) if name.endswith(b"/1")]
        await until(lambda: two.redis_time_ms > _number(at_redis, _LEFT) > 0)
        # Pretend that gateway 1 died without a goodbye.
        at_redis.delete(_LEFT, _LOST)
        at_redis.hset(GATEWAYS, died, b"0 %d" % two.redis_time_ms)
        with pytest.raises(ConversationsUnavailable):
            await two.get("t", ["resp_9"])
        # Once the gateway is given up, older mutable records may be incomplete, so `lost` is set.
        long_ago = two.redis_time_ms - shared_module.GATEWAY_TIMEOUT_MS - 1000
        at_redis.hset(GATEWAYS, died, b"0 %d" % long_ago)
        await until(lambda: _number(at_redis, _LOST) > 0)
        assert _number(at_redis, _LEFT) == _number(at_redis, _LOST)


async def test_nobody_says_goodbye_with_something_that_redis_has_not(
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = redis_server.url
    caplog.set_level(logging.INFO, upkeep_module.__name__)
    monkeypatch.setattr(upkeep_module, "GOODBYE_TIMEOUT_S", 0.5)
    async with following(tmp_path / "1", url, ephemeral=True) as one:
        at_redis.config_set("maxmemory", 1)
        await one.put("t", [Record("resp_1", b"on disk", FINAL)])
    assert "Redis lacks some" in caplog.text
    assert at_redis.hlen(GATEWAYS) == 1
    at_redis.config_set("maxmemory", 0)
    # Records that are only on the disk are uploaded before the goodbye.
    async with following(tmp_path / "1", url, ephemeral=True) as one:
        redis_server.kill()
        await one.put("t", [Record("resp_2", b"on disk", FINAL)])
        redis_server.start()
        monkeypatch.setattr(upkeep_module, "GOODBYE_TIMEOUT_S", _PATIENCE_S)
    assert at_redis.hlen(GATEWAYS) == 0
    async with following(tmp_path / "2", url, ephemeral=True) as two:
        assert None not in await _patiently(lambda: two.get("t", ["resp_1", "resp_2"]))


async def test_a_call_that_fails_does_not_end_a_goodbye(
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A goodbye is retried if a call to Redis fails, for example during a failover or a fork.

    Without a goodbye the other gateways would wait for an hour.
    """
    caplog.set_level(logging.INFO, upkeep_module.__name__)
    monkeypatch.setattr(upkeep_module, "GOODBYE_TIMEOUT_S", _PATIENCE_S)
    stack = AsyncExitStack()
    one = await stack.enter_async_context(
        following(tmp_path / "1", redis_server.url, ephemeral=True)
    )
    await one.put("t", [Record("resp_1", b"x", FINAL)])
    redis_server.kill()
    failures = one.stats.redis_failures
    leaving = asyncio.create_task(stack.aclose())
    await until(lambda: one.stats.redis_failures > failures)
    redis_server.start()
    await leaving
    assert "no other gateway waits" in caplog.text
    async with following(tmp_path / "2", redis_server.url, ephemeral=True) as two:
        assert await _patiently(lambda: two.get("t", ["resp_1"])) == [Record("resp_1", b"x", FINAL)]


async def test_the_last_worker_says_goodbye(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    url = redis_server.url
    async with following(tmp_path / "1", url, ephemeral=True) as second:
        async with following(tmp_path / "1", url, ephemeral=True):
            pass
        assert at_redis.hlen(GATEWAYS) == 1
        await second.put("t", [Record("resp_1", b"x", FINAL)])
    assert at_redis.hlen(GATEWAYS) == 0


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "stop", "begin", "add", "add", "peek", "wait", "flush"]),
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    max_size=25,
)


@pytest.mark.slow
@scale_examples(0.3)
@given(_STEPS)
def test_no_rollouts_and_flushes_make_a_conversation_short(
    shared_redis: RedisServer, steps: list[tuple[str, int, int]]
) -> None:
    async def run(at_redis: redis.Redis, folder: Path) -> None:
        at_redis.flushall()
        alive: list[tuple[Conversations, AsyncExitStack]] = []
        said: dict[str, list[Record]] = {}
        count = 0

        async def start() -> None:
            nonlocal count
            count += 1
            stack = AsyncExitStack()
            gateway = following(folder / str(count), shared_redis.url, ephemeral=True)
            alive.append((await stack.enter_async_context(gateway), stack))

        async def head_of(store: Conversations, name: str) -> Record | None:
            [head] = await _patiently(lambda: store.get("t", [name]))
            return head

        await start()
        for step, at, which in [*steps, ("flush", 0, 0)]:
            store, stack = alive[at % len(alive)]
            name = f"conv_{which % len(said)}" if said else ""
            if step == "start" and len(alive) < 3:
                await start()
            elif step == "stop" and len(alive) > 1:
                alive.remove((store, stack))
                await stack.aclose()
            elif step == "begin":
                name = f"conv_{len(said)}"
                await _patiently(
                    lambda name=name, store=store: store.put(
                        "t", [Record(name, b"head", order=store.redis_time_ms)]
                    )
                )
                said[name] = []
            elif step == "add" and name and await head_of(store, name):
                item = _item(name, len(said[name]))
                await _patiently(lambda item=item, store=store: store.put("t", [item]))
                said[name].append(item)
            elif step == "peek" and name and await head_of(store, name):
                await _patiently(lambda name=name, store=store: store.members("t", name, limit=1))
            elif step == "wait":
                before = store.redis_time_ms
                await until(lambda before=before, store=store: store.redis_time_ms > before)
            elif step == "flush":
                at_redis.flushall()
        for store, _ in alive:
            for name, items in said.items():
                if await head_of(store, name) is not None:
                    found = await _patiently(
                        lambda name=name, store=store: store.members("t", name)
                    )
                    assert found == items
        for _, stack in alive:
            await stack.aclose()

    with (
        pytest.MonkeyPatch.context() as patch,
        shared_redis.client() as at_redis,
        tempfile.TemporaryDirectory() as folder,
    ):
        # A goodbye that exceeded its time limit would make other gateways wait. Raise the limits,
        # as this test is not about them.
        patch.setattr(upkeep_module, "GOODBYE_TIMEOUT_S", 2 * _PATIENCE_S)
        patch.setattr(upkeep_module, "GOODBYE_SEEN_TIMEOUT_S", _PATIENCE_S)
        patch.setattr(upkeep_module, "POLL_INTERVAL_S", 0.03)
        patch.setattr(shared_module, "_SETTLED_MS", 300)
        asyncio.run(run(at_redis, Path(folder)))
