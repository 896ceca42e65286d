"""Durations of the store's Redis calls: none blocks Redis for long, however much is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from gateway.conversations.record import (
    DELETED,
    FINAL,
    MAX_MEMBERS,
    MAX_READ_BYTES,
    OVERHEAD_BYTES,
    Record,
)
from gateway.conversations.shared import RedisState, SharedConversations
from gateway.errors import ConversationTooLarge
from tests.support.redis_cost import MAX_CALL_US, longest_call_us
from tests.support.redis_server import RedisServer, running_redis

_TTL_MS = 10**9
_BYTES = 192 * 1024 * 1024
_CHAIN = 1024
_ITEMS_OF_ONE_RESPONSE = 8192


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisServer]:
    with pytest.MonkeyPatch.context() as patch:
        # Disable trimming in glibc's malloc, which returns freed memory in one step of 50 ms.
        # Release builds of Redis use jemalloc, which returns memory in small steps.
        patch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**40))
        with running_redis() as server:
            yield server


@pytest.fixture
def shared(
    shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> Iterator[SharedConversations]:
    bounds = {"ttl_ms": _TTL_MS, "tenant_bytes": _BYTES, "renew_ms": _TTL_MS // 10}
    one = SharedConversations(shared_redis.url, timeout_s=30, **bounds)
    yield one
    one.close()


def _put(shared: SharedConversations, tenant: str, records: list[Record], age: float = 0.0) -> None:
    """Put records that were last used a fraction `age` of the time to live ago."""
    used_ms = int(time.time() * 1000 - age * _TTL_MS)
    while not shared.put(tenant, records, used_ms=used_ms).done:
        pass


def _conversation(shared: SharedConversations, tenant: str, age: float = 0.0) -> None:
    items = [Record(f"m{n}", b"x" * 100, FINAL, "conv_1", n) for n in range(MAX_MEMBERS)]
    _put(shared, tenant, [Record("conv_1", b"head"), *items], age)


def _is_refused(shared: SharedConversations, tenant: str, record: Record) -> None:
    with pytest.raises(ConversationTooLarge):
        shared.put(tenant, [record])


def test_a_full_conversation(shared: SharedConversations, at_shared_redis: redis.Redis) -> None:
    """Measure renewals, a read, writes and a deletion of a conversation of maximum length."""
    items = [Record(f"m{n}", b"x" * 100, FINAL, "conv_1", n) for n in range(_ITEMS_OF_ONE_RESPONSE)]
    one_more = Record("m", b"x", FINAL, "conv_1", MAX_MEMBERS)
    ids = [f"m{n}" for n in range(MAX_MEMBERS)]
    works = {
        "renewed by a reading": lambda run: shared.get(f"r{run}", ["conv_1"]),
        "renewed by a writing": lambda run: shared.put(f"w{run}", [Record("conv_1", b"new", 1)]),
        "read": lambda run: shared.members(f"r{run}", "conv_1", -1, 1000),
        "refused": lambda run: _is_refused(shared, f"r{run}", one_more),
        "written": lambda run: shared.put(f"n{run}", items),
        "deleted": lambda run: shared.put(f"r{run}", [Record(i, b"", DELETED) for i in ids[:1000]]),
    }
    prepared = {
        "renewed by a reading": lambda run: _conversation(shared, f"r{run}", 0.5),
        "renewed by a writing": lambda run: _conversation(shared, f"w{run}", 0.5),
    }
    for name, work in works.items():
        prepare = prepared.get(name, lambda run: None)
        cost = longest_call_us(at_shared_redis, prepare, work)
        assert cost < MAX_CALL_US, f"{name}: {cost} us"


def test_a_renewal_is_done_when_its_call_returns(
    shared: SharedConversations, at_shared_redis: redis.Redis
) -> None:
    _conversation(shared, "t", 0.5)
    shared.get("t", ["conv_1"])
    prefix = "conversations:{.t}:"
    assert at_shared_redis.pttl(f"{prefix}r:conv_1") > 0.9 * _TTL_MS
    names = [f"{prefix}r:m{n}" for n in range(0, MAX_MEMBERS, 7)]
    assert min(map(at_shared_redis.pttl, names)) > 0.9 * _TTL_MS


def test_many_groups_are_renewed_at_once(
    shared: SharedConversations, at_shared_redis: redis.Redis
) -> None:
    """Measure the renewal of a chain of responses, each with its stream events."""
    chain = [f"resp_{n}" for n in range(_CHAIN)]

    def prepare(run: int) -> None:
        for id_ in chain:
            events = [Record(f"{id_}/{n}", b"x" * 50, FINAL, id_, n) for n in range(8)]
            _put(shared, f"t{run}", [Record(id_, b"x" * 100, FINAL), *events], 0.5)

    cost = longest_call_us(at_shared_redis, prepare, lambda run: shared.get(f"t{run}", chain))
    assert cost < MAX_CALL_US


def test_the_largest_records(shared: SharedConversations, at_shared_redis: redis.Redis) -> None:
    """Measure one record of maximum size, and the most records that a put and a read may have."""
    large = [Record("resp_1", b"x" * MAX_READ_BYTES, FINAL)]
    many = [Record(f"resp_{n}", b"x" * (MAX_READ_BYTES // _CHAIN), FINAL) for n in range(_CHAIN)]
    for name, records in {"large": large, "many": many}.items():
        ids = [record.id for record in records]
        gone = [Record(id_, b"", DELETED) for id_ in ids]

        def work(
            run: int,
            tenant: str = name,
            records: list[Record] = records,
            ids: list[str] = ids,
            gone: list[Record] = gone,
        ) -> None:
            _put(shared, f"{tenant}{run}", records)
            found = shared.get(f"{tenant}{run}", ids)
            assert [found[id_].record.data for id_ in ids] == [each.data for each in records]
            _put(shared, f"{tenant}{run}", gone)
            at_shared_redis.delete(*at_shared_redis.scan_iter(f"*{tenant}{run}*"))

        cost = longest_call_us(at_shared_redis, lambda run: None, work)
        assert cost < MAX_CALL_US, f"{name}: {cost} us"


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"", _BYTES // OVERHEAD_BYTES // 16), (b"x" * 2**20, _BYTES // 2**20 - 1)],
)
def test_room_is_made(
    shared: SharedConversations, at_shared_redis: redis.Redis, data: bytes, count: int
) -> None:
    """Measure the eviction of a conversation with many small or few large items."""
    filler = _BYTES - count * (len(data) + OVERHEAD_BYTES) - 10 * OVERHEAD_BYTES

    def prepare(run: int) -> None:
        at_shared_redis.flushall()
        records = [Record(f"m{n}", data, FINAL, "conv_1", n) for n in range(min(count, 9000))]
        _put(shared, "t", [Record("conv_1", b"head")], 0.5)
        for start in range(0, len(records), 20):
            _put(shared, "t", records[start : start + 20], 0.5)
        for n in range(0, max(0, filler), MAX_READ_BYTES):
            _put(shared, "t", [Record(f"f{n}", b"x" * min(MAX_READ_BYTES, filler - n), FINAL)])

    def work(run: int) -> None:
        _put(
            shared,
            "t",
            [Record("resp_new", b"x" * (MAX_READ_BYTES - OVERHEAD_BYTES), FINAL)],
        )

    assert longest_call_us(at_shared_redis, prepare, work) < MAX_CALL_US


def test_notices_and_looks(shared: SharedConversations, at_shared_redis: redis.Redis) -> None:
    """Measure polls beside 500 gateways, and reads of a tenant's maximum number of notices."""

    def prepare(run: int) -> None:
        for _ in range(50):
            pipeline = at_shared_redis.pipeline(transaction=False)
            for n in range(1000):
                pipeline.xadd("conversations:{.t}:gone", {"i": f"resp_{n}"})
            pipeline.execute()
        now = time.time_ns() // 10**6
        for n in range(500):
            name = f"gateway-{n}:/var/lib/gateway/@conversations"
            at_shared_redis.hset("conversations:{all}:gateways", name, f"1 {now}")
        shared.put("t", [Record(f"resp_x{run}", b"", DELETED)])

    def work(run: int) -> None:
        known = shared.poll(RedisState(), "me").state
        shared.poll(known, "me", "whole", (known.epoch, 0))
        for _ in range(20):
            assert shared.read_deletions()

    assert longest_call_us(at_shared_redis, prepare, work) < MAX_CALL_US
