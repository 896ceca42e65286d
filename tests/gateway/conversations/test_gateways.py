"""Several gateways at one real Redis: each finds the others' records, also after losses of data."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from gateway.conversations import redis_threads as redis_threads_module
from gateway.conversations import store as store_module
from gateway.conversations import upkeep as upkeep_module
from gateway.conversations.disk import FILE, ConversationDisk
from gateway.conversations.record import FINAL, Record
from gateway.conversations.store import Conversations
from gateway.errors import ConversationsUnavailable
from tests.support.conversations import GATEWAYS, TENANT_BYTES, following, until
from tests.support.examples import scale_examples
from tests.support.full_disk import full_disk
from tests.support.redis_server import RedisServer

_EPOCH = "conversations:{all}:epoch"
_SINCE = "conversations:{all}:since"
_LONG_AGO = 1_700_000_000_000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout for restored records, because uploads take long on a busy machine."""
    monkeypatch.setattr(store_module, "_RESTORE_TIMEOUT_S", 60)


def _settle(at_redis: redis.Redis) -> None:
    """Make Redis look as if all gateways had polled it for a long time."""
    run = at_redis.info("server")["run_id"]
    at_redis.mset({_EPOCH: _LONG_AGO, _SINCE: _LONG_AGO, "conversations:{all}:run": run})


def _gateways(at_redis: redis.Redis) -> set[int]:
    """Return the numbers of the gateways that Redis knows, which end their folder names."""
    return {int(name[-1:]) for name in at_redis.hkeys(GATEWAYS)}


def _on_disk(folder: Path) -> dict[str, bytes]:
    with contextlib.closing(sqlite3.connect(folder / FILE)) as file:
        return dict(file.execute("SELECT id, data FROM records").fetchall())


def _known(folder: Path) -> set[str]:
    """Return the names of gateways that the gateway with this folder has saved."""
    with contextlib.closing(sqlite3.connect(folder / FILE)) as file:
        return {name for (name,) in file.execute("SELECT name FROM gateways").fetchall()}


def _seen(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(folder / FILE)) as file:
        return int(file.execute("SELECT seen FROM looked").fetchone()[0])


async def test_what_one_gateway_keeps_another_finds_and_keeps(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url, items = redis_server.url, [Record(f"m{n}", b"x", 0, "conv_1", n) for n in range(9)]
    async with following(tmp_path / "2", url) as two:
        async with following(tmp_path / "1", url) as one:
            await one.put("a", [Record("resp_1", b"first", 1), Record("conv_1", b"head"), *items])
            await one.put("a", [Record("resp_3", b"read by two, and no more", FINAL)])
            assert None not in await two.get("a", ["resp_3"])
            assert await two.get("a", ["resp_1", "resp_2"]) == [Record("resp_1", b"first", 1), None]
            assert await two.get("b", ["resp_1", "m1"]) == [None, None]
            assert await two.get("a", ["conv_1"]) == [Record("conv_1", b"head")]
            assert await two.members("a", "conv_1") == items
            assert await two.get("b", ["conv_1"]) == [None]
            items[0] = items[0]._replace(version=1)
            await two.put("a", [Record("resp_1", b"second", FINAL), items[0]])
            assert await one.get("a", ["resp_1"]) == [Record("resp_1", b"second", FINAL)]
        # The first gateway never starts again, and Redis loses all data.
        redis_server.kill()
        await _until_away(two)
        assert None not in await two.get("a", ["resp_1", "resp_3"])
        with pytest.raises(ConversationsUnavailable):
            await two.get("a", ["resp_1", "resp_9"])
        with pytest.raises(ConversationsUnavailable):
            await two.members("a", "conv_1")
        redis_server.start()
        await until(lambda: _gateways(at_redis) == {1, 2})
        at_redis.hdel(GATEWAYS, *[name for name in at_redis.hkeys(GATEWAYS) if b"/1" in name])
        assert await _patiently(lambda: two.members("a", "conv_1")) == items


async def _until_away(store: Conversations) -> None:
    failures = store.stats.redis_failures
    await until(lambda: store.stats.redis_failures > failures)


async def _patiently(ask: Callable[[], object]) -> list[Record]:
    """Call `ask` again until it succeeds, as a client does after a 503."""
    async with asyncio.timeout(300):
        while True:
            try:
                return await ask()  # type: ignore[misc, no-any-return]
            except ConversationsUnavailable:
                await asyncio.sleep(0.05)


async def test_nothing_is_lost_by_a_flush(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url, ids = redis_server.url, [f"resp_{n}" for n in range(300)]
    async with following(tmp_path / "1", url) as one, following(tmp_path / "2", url) as two:
        for number, id_ in enumerate(ids):
            await (one, two)[number % 2].put("t", [Record(id_, b"x" * 1000, FINAL)])
        await one.put("t", [Record("conv_1", b"head"), Record("i1", b"x", 0, "conv_1", 1)])
        at_redis.flushall()
        # Each gateway has half of the records. Neither may report the other half as missing.
        for store in (two, one):
            assert None not in await _patiently(lambda store=store: store.get("t", ids))
        assert [each.id for each in await two.members("t", "conv_1")] == ["i1"]
        assert await _patiently(lambda: two.get("t", ["resp_x"])) == [None]


async def test_nothing_is_lost_by_flushes_at_any_moment(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url, ids = redis_server.url, [f"resp_{n}" for n in range(150)]
    async with following(tmp_path / "1", url) as one, following(tmp_path / "2", url) as two:
        for number, id_ in enumerate(ids):
            await (one, two)[number % 2].put("t", [Record(id_, b"x" * 1000, FINAL)])
            if number % 40 == 13:
                at_redis.flushall()
            if number % 10 == 5:  # read the new record at the other gateway
                get = partial((two, one)[number % 2].get, "t", [id_])
                assert None not in await _patiently(get)
        await one.delete("t", ids[:3])
        at_redis.flushall()
        for store in (one, two):
            found = await _patiently(lambda store=store: store.get("t", ids))
            assert [each is None for each in found] == [True] * 3 + [False] * 147


async def test_what_is_deleted_leaves_every_disk_and_does_not_return(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url = redis_server.url
    async with following(tmp_path / "1", url) as one, following(tmp_path / "2", url) as two:
        await one.put("t", [Record("resp_1", b"secret"), Record("resp_2", b"stays")])
        assert None not in await two.get("t", ["resp_1", "resp_2"])
        await two.delete("t", ["resp_1"])
        await until(lambda: _on_disk(tmp_path / "1")["resp_1"] == b"")
        assert _on_disk(tmp_path / "2")["resp_1"] == b""
        at_redis.flushall()
        assert await one.get("t", ["resp_1", "resp_2"]) == [None, Record("resp_2", b"stays")]
    # A gateway that was down during the deletion uploads its stale record at its start, and then
    # deletes it.
    async with following(tmp_path / "2", url) as two:
        await two.delete("t", ["resp_2"])
        at_redis.flushall()
        assert await two.get("t", ["resp_2"]) == [None]
        async with following(tmp_path / "1", url) as one:
            await until(lambda: _on_disk(tmp_path / "1")["resp_2"] == b"")
            assert await one.get("t", ["resp_2"]) == [None]


async def test_without_redis_a_put_goes_to_the_disk_and_is_brought_later(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    url = redis_server.url
    async with following(tmp_path / "1", url) as one:
        redis_server.kill()
        await one.put("t", [Record("resp_1", b"at once", FINAL)])
        assert await one.get("t", ["resp_1"]) == [Record("resp_1", b"at once", FINAL)]
        for growing in (Record("conv_1", b"head"), Record("m", b"x", FINAL, "conv_1", 1)):
            with pytest.raises(ConversationsUnavailable):
                await one.put("t", [growing])
        with pytest.raises(ConversationsUnavailable):
            await one.get("t", ["resp_2"])
        redis_server.start()
        await until(lambda: at_redis.exists("conversations:{.t}:r:resp_1"))
        redis_server.kill()
        await one.put("t", [Record("resp_3", b"after a restart", FINAL)])
    # The gateway starts and ends while Redis is down. A later start uploads the record.
    async with following(tmp_path / "1", url) as one:
        assert await one.get("t", ["resp_3"]) == [Record("resp_3", b"after a restart", FINAL)]
    redis_server.start()
    async with following(tmp_path / "2", url) as two, following(tmp_path / "1", url):
        assert None not in await two.get("t", ["resp_1", "resp_3"])


async def test_a_redis_that_hangs_is_waited_for_once(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with following(tmp_path / "1", redis_server.url) as one:
        redis_server.signal(signal.SIGSTOP)
        try:
            for n in range(20):
                await one.put("t", [Record(f"resp_{n}", b"x")])
            assert one.stats.redis_failures < 10
        finally:
            redis_server.signal(signal.SIGCONT)


async def test_many_who_ask_at_once_wait_for_a_redis_that_hangs_once(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    async with following(tmp_path / "1", redis_server.url) as one:
        await one.put("t", [Record("resp_1", b"x", FINAL)])
        redis_server.signal(signal.SIGSTOP)
        try:
            await asyncio.gather(*[one.get("t", ["resp_1"]) for _ in range(40)])
            assert one.stats.redis_failures < 10
        finally:
            redis_server.signal(signal.SIGCONT)


async def test_a_full_redis_and_a_full_disk_stand_in_for_each_other(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url = redis_server.url
    async with following(tmp_path / "1", url) as one, following(tmp_path / "2", url) as two:
        await one.put("t", [Record("resp_0", b"x", FINAL)])
        at_redis.config_set("maxmemory", 1)
        await one.put("t", [Record("resp_1", b"on disk", FINAL)])
        assert not at_redis.exists("conversations:{.t}:r:resp_1")
        assert None not in await one.get("t", ["resp_0", "resp_1"])
        assert await two.get("t", ["resp_0"]) == [Record("resp_0", b"x", FINAL)]
        with full_disk(1), pytest.raises(ConversationsUnavailable):
            await one.put("t", [Record("resp_2", bytes(10**6))])
        at_redis.config_set("maxmemory", 0)
        with full_disk(1):
            await one.put("t", [Record("resp_3", b"y" * 10**6, FINAL)])
        assert one.stats.disk_failures > 0
        assert None not in await two.get("t", ["resp_0", "resp_1", "resp_3"])
        assert None not in await one.get("t", ["resp_3"])
        await one.put("t", [Record("resp_4", b"on both", FINAL)])
        assert _on_disk(tmp_path / "1")["resp_4"] == b"on both"


async def test_what_is_not_found_is_not_called_lost_while_a_gateway_brings(
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _settle(at_redis)
    async with following(tmp_path / "1", redis_server.url) as one:
        assert await one.get("t", ["resp_1"]) == [None]
        await one.put("t", [Record("resp_2", b"x")])
        at_redis.hset(GATEWAYS, "another", f"0 {2**52}")
        monkeypatch.setattr(store_module, "_RESTORE_TIMEOUT_S", 0.3)
        with pytest.raises(ConversationsUnavailable, match="being restored"):
            await one.get("t", ["resp_1"])
        assert await one.get("t", ["resp_2"]) == [Record("resp_2", b"x")]
        monkeypatch.setattr(store_module, "_RESTORE_TIMEOUT_S", 60)
        waiting = asyncio.create_task(one.get("t", ["resp_1"]))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        at_redis.hdel(GATEWAYS, "another")
        assert await waiting == [None]


async def test_what_redis_let_go_comes_back_where_any_copy_is_all_of_it(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    """A record that Redis expired or evicted is restored from a gateway whose copy is complete."""
    _settle(at_redis)
    url = redis_server.url
    async with following(tmp_path / "1", url) as one, following(tmp_path / "2", url) as two:
        items = [Record(f"m{n}", b"x", FINAL, "conv_1", n) for n in range(3)]
        await one.put("t", [Record("conv_1", b"head"), Record("resp_1", b"x", FINAL), *items[:2]])
        await two.put("t", [items[2], Record("conv_1", b"new head", 1)])
        at_redis.delete("conversations:{.t}:r:m1")
        assert await one.members("t", "conv_1") == items
        with pytest.raises(ConversationsUnavailable):
            await two.members("t", "conv_1")
        at_redis.delete(*at_redis.scan_iter("conversations:{.t}:*"))
        # Gateway one has only the first two items.
        assert await one.get("t", ["conv_1"]) == [None]
        with pytest.raises(ConversationsUnavailable):
            await one.members("t", "conv_1")
        for store in (one, two):
            assert await store.get("t", ["resp_1"]) == [Record("resp_1", b"x", FINAL)]


async def test_what_there_is_no_room_for_does_not_come_back_in_part(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url = redis_server.url
    async with following(tmp_path / "1", url) as one, following(tmp_path / "2", url) as two:
        first, second = (Record(f"m{n}", b"x", FINAL, "conv_1", n) for n in range(2))
        await one.put("t", [Record("conv_1", b"head"), first])
        await two.put("t", [second])
        for n in range(9):
            await two.put("t", [Record(f"resp_{n}", bytes(TENANT_BYTES // 8), FINAL)])
        assert await one.get("t", ["conv_1"]) == [None]
        for name in "12":
            await until(
                lambda name=name: not {"conv_1", "m0", "m1"} & _on_disk(tmp_path / name).keys()
            )
        at_redis.flushall()
        assert await _patiently(lambda: one.get("t", ["conv_1", "m0", "m1"])) == [None] * 3


async def test_nothing_older_is_read_while_a_gateway_that_may_know_more_is_away(
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _settle(at_redis)
    monkeypatch.setattr(store_module, "_RESTORE_TIMEOUT_S", 0)
    url, items = redis_server.url, [Record(f"m{n}", b"x", FINAL, "conv_1", n) for n in range(4)]

    async def refused(store: Conversations) -> None:
        # Pretend that the other gateways had enough time to report. The refusal is then due to the
        # missing gateway.
        at_redis.mset({_SINCE: _LONG_AGO, "conversations:{all}:kept": 10**14})
        with pytest.raises(ConversationsUnavailable):
            await store.get("t", ["resp_2"])  # only on the other gateway's disk
        with pytest.raises(ConversationsUnavailable):
            await store.get("t", ["conv_1"])
        with pytest.raises(ConversationsUnavailable):
            await store.members("t", "conv_1")
        at_redis.set(_SINCE, at_redis.get(_EPOCH) or b"")

    async with following(tmp_path / "1", url) as one:
        async with following(tmp_path / "2", url) as two:
            await one.put("t", [Record("conv_1", b"head", 1), Record("resp_1", b"x", FINAL)])
            await one.put("t", items[:2])
            await two.put("t", [*items[2:], Record("conv_1", b"newer", 2)])
            await two.put("t", [Record("resp_2", b"x", FINAL)])
            await until(lambda: len(_known(tmp_path / "1")) == 2)
        at_redis.flushall()
        await until(lambda: at_redis.exists("conversations:{.t}:r:conv_1"))
        await refused(one)
        # Complete data is served: immutable records, and conversations that began after the loss.
        assert None not in await one.get("t", ["resp_1", "m0"])
        assert await one.get("t", ["resp_9"], patient=False) == [None]
        new = Record("m9", b"x", FINAL, "conv_9", 1)
        await one.put("t", [Record("conv_9", b"new"), new])
        assert await one.get("t", ["conv_9"]) == [Record("conv_9", b"new")]
        assert await one.members("t", "conv_9") == [new]
    # The refusal survives a restart of the gateways and another loss of all data in Redis.
    at_redis.flushall()
    async with following(tmp_path / "1", url) as one:
        await until(lambda: at_redis.exists("conversations:{.t}:r:conv_1"))
        await refused(one)
        async with following(tmp_path / "2", url) as two:
            for store in (one, two):
                assert await _patiently(lambda store=store: store.members("t", "conv_1")) == items
                assert await store.get("t", ["conv_1"]) == [Record("conv_1", b"newer", 2)]
                assert None not in await store.get("t", ["resp_1", "resp_2", "conv_9"])
                assert await store.get("t", ["resp_9"]) == [None]


async def test_a_redis_that_lost_its_last_moments_is_never_read_short(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url, items = redis_server.url, [Record(f"m{n}", b"x", FINAL, "conv_1", n) for n in range(6)]
    async with following(tmp_path / "1", url) as one, following(tmp_path / "2", url) as two:
        await one.put("t", [Record("conv_1", b"head"), *items[:2]])
        for n in (2, 4):
            await _patiently(lambda: two.members("t", "conv_1"))
            at_redis.save()
            await one.put("t", items[n : n + 2])
            redis_server.kill()
            redis_server.start()
            assert await _patiently(lambda: two.members("t", "conv_1")) == items[: n + 2]


async def test_what_redis_lost_while_a_gateway_was_away_is_brought_at_its_start(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url, items = redis_server.url, [Record(f"m{n}", b"x", FINAL, "conv_1", n) for n in range(4)]
    async with following(tmp_path / "1", url) as one:
        await one.put("t", [Record("conv_1", b"head"), *items[:2]])
        assert await _patiently(lambda: one.members("t", "conv_1")) == items[:2]
        at_redis.save()
        await one.put("t", items[2:])
    redis_server.kill()  # as on a restart of the machine with both the gateway and Redis
    redis_server.start()
    epoch = at_redis.get(_EPOCH)
    async with following(tmp_path / "1", url) as one:
        assert await _patiently(lambda: one.members("t", "conv_1")) == items
        assert at_redis.get(_EPOCH) == epoch
        at_redis.save()
        seen = at_redis.incrby("conversations:{all}:seen", 10**9)
        await until(lambda: _seen(tmp_path / "1") > seen)
    redis_server.kill()
    redis_server.start()
    async with following(tmp_path / "1", url) as one:
        # Redis is too far behind for the gateway to know which records are missing. So a new epoch
        # begins, and the gateway uploads all records.
        assert at_redis.get(_EPOCH) != epoch
        assert await _patiently(lambda: one.members("t", "conv_1")) == items


async def test_redis_is_looked_at_no_more_often_while_much_is_tidied(
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Removing many rows from the disk causes no additional calls to Redis.

    The poll interval is an hour, so the number of calls does not depend on the machine's speed.
    """
    monkeypatch.setattr(upkeep_module, "POLL_INTERVAL_S", 3600.0)
    _settle(at_redis)
    disk = ConversationDisk(tmp_path, ttl_ms=10**9, tenant_bytes=10**9, renew_ms=10**6)
    disk.put("t", [Record(f"m{n}", bytes(10**6), FINAL, "conv_1", n) for n in range(100)])
    disk.forget_unit("t", "conv_1")
    disk.close()

    def free() -> int:
        with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as file:
            return int(file.execute("PRAGMA freelist_count").fetchone()[0])

    assert free() > 20_000
    async with following(tmp_path, redis_server.url):
        await until(lambda: free() < 300)
        assert at_redis.info("commandstats")["cmdstat_evalsha"]["calls"] < 50


async def test_workers_share_a_disk_and_one_looks_after_it(
    redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    _settle(at_redis)
    url, ids = redis_server.url, [f"resp_{n}" for n in range(100)]
    async with contextlib.AsyncExitStack() as workers:
        first = await workers.enter_async_context(following(tmp_path, url))
        second = await workers.enter_async_context(following(tmp_path, url))
        for number, id_ in enumerate(ids):
            await (first, second)[number % 2].put("t", [Record(id_, b"x")])
        at_redis.flushall()
        assert None not in await second.get("t", ids)
        await until(lambda: _all_brought(at_redis))
        await until(lambda: first.stats.records == 100)
        with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as file:
            epochs = file.execute("SELECT DISTINCT shared FROM records").fetchall()
        assert epochs == [(int(at_redis.get(_EPOCH) or 0),)], "it would be brought again"
        assert second.stats.records == 0


_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 1), st.integers(0, 3), st.integers(0, 6)),
        st.tuples(st.just("delete"), st.integers(0, 1), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("get"), st.integers(0, 1), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("flush"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@scale_examples(0.2)
@given(_OPERATIONS)
def test_copies_agree_on_the_highest_version_whatever_happens(
    shared_redis: RedisServer, operations: list[tuple[str, int, int, int]]
) -> None:
    """Two gateways without upkeep let the copies diverge.

    Starting both with upkeep merges the copies.
    """

    async def run(url: str, at_redis: redis.Redis, folder: Path) -> None:
        at_redis.flushall()
        _settle(at_redis)
        highest = [-1] * 4
        async with contextlib.AsyncExitStack() as stack:
            pair = [
                await stack.enter_async_context(
                    Conversations(folder / str(n), url, ttl_s=10**6, tenant_bytes=TENANT_BYTES)
                )
                for n in range(2)
            ]
            for operation, at, number, version in operations:
                id_ = f"resp_{number}"
                if operation == "put":
                    await pair[at].put("t", [Record(id_, b"%d" % version, version)])
                    highest[number] = max(highest[number], version)
                elif operation == "delete":
                    await pair[at].delete("t", [id_])
                    highest[number] = 99
                elif operation == "get":
                    await pair[at].get("t", [id_], patient=False)
                else:
                    at_redis.flushall()
                    _settle(at_redis)
        at_redis.set(_EPOCH, _LONG_AGO + 1)  # begin an epoch, in which no disk counts as uploaded
        async with following(folder / "0", url) as one, following(folder / "1", url) as two:
            await until(lambda: _all_brought(at_redis))
            for store in (one, two):
                found = await store.get("t", [f"resp_{n}" for n in range(4)])
                assert [None if each is None else each.version for each in found] == [
                    None if version in (-1, 99) else version for version in highest
                ]

    with shared_redis.client() as at_redis, tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(shared_redis.url, at_redis, Path(folder)))


def _all_brought(at_redis: redis.Redis) -> bool:
    epoch = at_redis.get(_EPOCH)
    rows = at_redis.hvals(GATEWAYS)
    return epoch is not None and rows != [] and all(row.startswith(epoch) for row in rows)


@pytest.mark.parametrize(
    ("setting", "refusing", "why"),
    [("maxmemory", "1", "no memory left"), ("min-replicas-to-write", "1", "fewer replicas")],
)
async def test_a_redis_that_takes_no_writes_is_told_of_once_though_it_is_read(
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    refusing: str,
    why: str,
) -> None:
    caplog.set_level("INFO", "gateway.conversations")

    def said(text: str) -> int:
        return sum(text in message for message in caplog.messages)

    async with following(tmp_path / "1", redis_server.url) as one:
        await one.put("t", [Record("resp_0", b"x", FINAL)])
        at_redis.config_set(setting, refusing)
        for number in range(1, 30):
            await one.put("t", [Record(f"resp_{number}", b"x", FINAL)])
            assert await one.get("t", ["resp_0"]) == [Record("resp_0", b"x", FINAL)]
            assert why in one.problems[1]
        assert (said("not shared now"), said("shared again")) == (1, 0)
        at_redis.config_set(setting, "0")
        await until(lambda: not one.problems[1])
        assert at_redis.exists("conversations:{.t}:r:resp_29")
    assert (said("not shared now"), said("shared again")) == (1, 1)


async def test_a_growing_write_that_was_refused_is_no_trouble_for_ever(
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused addition to a conversation is reported as a problem only until Redis recovers.

    No disk has the refused record, so no later upload could end the problem.
    """
    monkeypatch.setattr(redis_threads_module, "_RECOVERY_S", 0.5)
    async with following(tmp_path / "1", redis_server.url) as one:
        at_redis.config_set("maxmemory", "1")
        with pytest.raises(ConversationsUnavailable):
            await one.put("t", [Record("conv_1", b"head")])
        assert one.problems[1]
        at_redis.config_set("maxmemory", "0")
        await until(lambda: not one.problems[1])
