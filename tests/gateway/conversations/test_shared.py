"""The Redis copy of conversations: versions, tenants, size limits, expiry and foreign data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis

from gateway.conversations.record import DELETED, FINAL, MAX_MEMBERS, OVERHEAD_BYTES, Record
from gateway.conversations.shared import (
    GATEWAY_TIMEOUT_MS,
    PollResult,
    RedisState,
    SharedConversations,
)
from gateway.conversations.tenant_records import Copy, Members
from gateway.errors import ConversationTooLarge
from tests.support.redis_server import RedisServer

_BYTES = 1024 * 1024
_TTL_MS = 1_000_000
_ALL = "conversations:{all}:"
_EPOCH, _SINCE = f"{_ALL}epoch", f"{_ALL}since"


@pytest.fixture
def shared(
    shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> Iterator[Callable[..., SharedConversations]]:
    made: list[SharedConversations] = []

    def make(
        tenant_bytes: int = _BYTES, on_refused: Callable[[], object] = lambda: None
    ) -> SharedConversations:
        one = SharedConversations(
            shared_redis.url,
            timeout_s=30,
            ttl_ms=_TTL_MS,
            tenant_bytes=tenant_bytes,
            renew_ms=_TTL_MS // 10,
            on_refused=on_refused,
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def _now() -> int:
    return int(time.time() * 1000)


def test_the_highest_version_stays(shared: Callable[..., SharedConversations]) -> None:
    one, two = shared(), shared()
    for version, data in [(1, b"one"), (2**62 + 1, b"two"), (2**62, b"late"), (2**62 + 1, b"2nd")]:
        one.put("a", [Record("conv_1", data, version)])
    assert two.get("a", ["conv_1", "x"]) == {"conv_1": Copy(Record("conv_1", b"two", 2**62 + 1), 0)}
    assert two.put("a", [Record("conv_1", b"late")]) == (True, 0, True, ["conv_1"])
    two.put("a", [Record("conv_1", b"", DELETED)])
    one.put("a", [Record("conv_1", b"back", 2**62 + 2)])
    assert one.get("a", ["conv_1"])["conv_1"].record == Record("conv_1", b"", DELETED)
    assert one.read_deletions() == [("a", "conv_1", False)]
    assert one.read_deletions() == []


def test_tenants_are_apart(shared: Callable[..., SharedConversations]) -> None:
    one = shared()
    names = ["", "a", "a.b", "r", "-", "all"]
    for name in names:
        one.put(name, [Record("conv_1", name.encode() + b"'s"), Record("m", b"x", 0, "conv_1", 1)])
    one.put("a", [Record("conv_1", b"", DELETED), Record("m", b"", DELETED)])
    for name in names:
        found = one.get(name, ["conv_1"])["conv_1"].record
        assert found.data == (b"" if name == "a" else name.encode() + b"'s")
        ids, records, *_ = one.members(name, "conv_1", -1, 10)
        assert (ids, list(records)) == (([], []) if name == "a" else (["m"], ["m"]))


def test_members_come_by_order(shared: Callable[..., SharedConversations]) -> None:
    one = shared()
    # consecutive values differ by less than the precision of a float
    first = 1_800_000_000_000_000_000
    items = [Record(f"msg_{n}", b"x", 0, "conv_1", first + n) for n in range(20)]
    one.put("", [Record("conv_1", b"head"), *items[10:], *items[:10]])
    ids, copies, *_ = one.members("", "conv_1", -1, 1000)
    assert [copies[id_].record for id_ in ids] == items
    assert one.members("", "conv_1", first + 4, 3)[0] == ["msg_5", "msg_6", "msg_7"]
    # Move msg_0 to another conversation, and msg_1 to another position.
    one.put("", [Record("msg_0", b"y", 1, "conv_2", 5), Record("msg_1", b"z", 1, "conv_1", 7)])
    assert one.members("", "conv_1", -1, 2)[0] == ["msg_1", "msg_2"]
    assert one.members("", "conv_2", -1, 2)[0] == ["msg_0"]


def test_all_keys_of_a_tenant_expire_and_are_renewed_as_a_whole(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one, prefix = shared(), "conversations:{.t}:"
    unit = [Record("conv_1", b"head"), Record("m", b"x", 0, "conv_1", 1)]
    one.put("t", unit, used_ms=_now() - _TTL_MS // 2)

    def left() -> dict[str, int]:
        keys = sorted(at_shared_redis.scan_iter(f"{prefix}*"))
        return {key.decode().removeprefix(prefix): at_shared_redis.pttl(key) for key in keys}

    before = left()
    assert set(before) == {"r:conv_1", "r:m", "g:conv_1", "used", "sizes"}
    assert 0 < max(before["r:conv_1"], before["r:m"]) <= _TTL_MS // 2
    one.get("t", ["conv_1"])
    renewed = left()
    assert min(renewed["r:conv_1"], renewed["r:m"], renewed["g:conv_1"]) > _TTL_MS * 0.8
    assert min(renewed["used"], renewed["sizes"]) > _TTL_MS
    used = at_shared_redis.zscore(f"{prefix}used", "conv_1")
    for _ in range(3):
        one.get("t", ["conv_1", "m"])
        one.members("t", "conv_1", -1, 10)
    assert at_shared_redis.zscore(f"{prefix}used", "conv_1") == used, "each reading writes"
    one.put("t", [Record("old", b"x")], used_ms=_now() - _TTL_MS)
    assert one.get("t", ["old"]) == {}


def test_no_part_of_a_unit_outlives_the_others(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one = shared()
    head, item = Record("conv_1", b"head"), Record("m", b"x", 0, "conv_1", 1)
    one.put("t", [head, item], used_ms=_now() - _TTL_MS // 20)
    one.put("t", [head._replace(version=1), item._replace(id="m2", order=2)])
    names = ("r:conv_1", "r:m", "r:m2", "g:conv_1")
    left = [at_shared_redis.pttl(f"conversations:{{.t}}:{name}") for name in names]
    assert max(left) - min(left) < _TTL_MS // 40


def test_room_for_many_is_made_at_the_cost_of_what_goes(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    def cpu_s() -> float:
        return float(at_shared_redis.info("cpu")["used_cpu_user"])

    one = shared(2 * 1000 * (OVERHEAD_BYTES + 1))
    for name in "abc":
        before = cpu_s()
        records = [Record(f"{name}{n}", b"x", FINAL) for n in range(1000)]
        while not one.put("t", records).done:
            pass
    assert cpu_s() - before < 0.2
    assert len(one.get("t", [record.id for record in records])) == 1000


def test_many_deletions_are_told_at_once(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    def reads() -> int:
        return int(at_shared_redis.info("stats")["total_reads_processed"])

    one, records = shared(), [Record(f"m{n}", b"", DELETED) for n in range(500)]
    before = reads()
    one.put("t", records)
    assert reads() - before < 100
    assert {each.id for each in one.read_deletions(1000)} >= {record.id for record in records}


def test_a_hostile_tenant_loses_its_own_longest_unused_alone(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one = shared()
    one.put("other", [Record("resp_o", b"keep")])
    now = _now()
    for n in range(40):
        one.put("hostile", [Record(f"resp_{n}", bytes(100_000))], used_ms=now - 1000 + n)
    found = one.get("hostile", [f"resp_{n}" for n in range(40)])
    assert list(found) == [f"resp_{n}" for n in range(30, 40)]
    assert one.get("other", ["resp_o"]) == {"resp_o": Copy(Record("resp_o", b"keep"), 0)}
    # An upload of a record with an older time of use evicts no newer record.
    one.put("hostile", [Record("older", bytes(100_000))], used_ms=now - 5000)
    assert len(one.get("hostile", ["older", *found])) == 10
    sizes = at_shared_redis.hgetall("conversations:{.hostile}:sizes")
    assert int(sizes.pop(b"@")) == sum(map(int, sizes.values())) == 10 * (100_000 + OVERHEAD_BYTES)


def test_no_bound_is_passed_by_many_small_ones(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one = shared()
    for n in range(_BYTES // OVERHEAD_BYTES // 8):
        one.put("", [Record(f"resp_{n}_{m}", b"") for m in range(8)])
    calls, done = 0, False
    while not done:
        done, evicted, _, _ = one.put("", [Record("large", bytes(_BYTES - 2 * OVERHEAD_BYTES))])
        calls += 1
        assert evicted <= 256
        assert int(at_shared_redis.hget("conversations:{.}:sizes", "@") or 0) <= _BYTES
    assert calls > 1


def test_a_conversation_is_evicted_whole(shared: Callable[..., SharedConversations]) -> None:
    one, now = shared(), _now()
    one.put("", [Record("conv_1", b"head")], used_ms=now - 1000)
    for n in range(700):
        one.put("", [Record(f"item_{n}", bytes(700), 0, "conv_1", n)], used_ms=now - 1000)
    one.put("", [Record("resp_1", bytes(100_000))])
    done = False
    while not done:
        done, evicted, _, _ = one.put("", [Record("resp_2", bytes(100_000))])
        assert 0 < evicted <= 256
        assert one.get("", ["conv_1"]) == {}, "items are missing, and nobody is told"
        assert one.members("", "conv_1", -1, 1000).epoch == -1
    assert one.members("", "conv_1", -1, 1000) == Members([], {}, -1, 0)
    assert set(one.read_deletions()) == {("", "conv_1", True)}


def test_what_is_too_large_is_refused(shared: Callable[..., SharedConversations]) -> None:
    one = shared()
    one.put("", [Record("conv_1", b"head"), Record("a", bytes(_BYTES // 2), 0, "conv_1", 1)])
    with pytest.raises(ConversationTooLarge):
        one.put("", [Record("b", bytes(_BYTES // 2), 0, "conv_1", 2)])
    assert one.members("", "conv_1", -1, 10)[0] == ["a"]
    many = shared(tenant_bytes=2**30)
    for start in range(0, MAX_MEMBERS, 2500):
        some = range(start, start + 2500)
        many.put("many", [Record(f"m{n}", b"x", 0, "conv_1", n) for n in some])
    with pytest.raises(ConversationTooLarge):
        many.put("many", [Record("m", b"x", 0, "conv_1", 0)])
    for n in range(3):
        many.put("many", [Record(f"resp_{n}", bytes(15_000_000))])
    assert len(many.get("many", ["resp_0", "resp_1"])) == 2
    with pytest.raises(ConversationTooLarge):
        many.get("many", ["resp_0", "resp_1", "resp_2"])


def test_what_somebody_else_put_there_is_left_alone(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    refused: list[int] = []
    one = shared(on_refused=lambda: refused.append(1))
    prefix = "conversations:{.t}:"
    head = b"c1 %020d %020d %020d " % (0, 1, 1)
    wrong = {
        "garbage": b"\x80\x04pickle",
        "empty": b"",
        "newer": b"c2 what a newer release writes",
        "name": head + b"not/ an id\nx",
        "version": b"c1 %020d %d %020d \nx" % (0, 10**20 - 1, 0),
        "long": head + b"g" * 400 + b"\nx",
    }
    for name, value in wrong.items():
        at_shared_redis.set(f"{prefix}r:{name}", value)
    for member in (b"garbage", b"\xff" * 50, b"%020d:nothing" % 1):
        at_shared_redis.zadd(f"{prefix}g:conv_1", {member: 0})
    assert one.get("t", list(wrong)) == {}
    assert one.members("t", "conv_1", -1, 100)[1] == {}
    for name in set(wrong) - {"empty", "version"}:
        assert not one.put("t", [Record(name, b"x", 5)]).accepted
        assert at_shared_redis.get(f"{prefix}r:{name}") == wrong[name]
    at_shared_redis.set(f"{prefix}used", "not a set")
    assert not one.put("t", [Record("resp_1", b"x")]).accepted
    assert one.put("u", [Record("resp_1", b"x")]).accepted
    assert refused


def _settle(at_redis: redis.Redis, look: PollResult) -> None:
    """Make Redis look as if nothing had happened for a long time."""
    at_redis.mset({_SINCE: look.state.epoch - 10_000, f"{_ALL}kept": look.state.seen + 10**6})


def test_the_epoch_changes_when_all_is_lost(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one = shared()
    first = one.poll(RedisState())
    assert not first.settled, "others may have something to bring"
    assert one.poll(first.state).state.epoch == first.state.epoch
    _settle(at_shared_redis, first)
    assert one.poll(first.state).settled
    for lost in (b"", b"garbage", b"0", b"9" * 50):
        at_shared_redis.set(_EPOCH, lost)
        assert one.poll(RedisState()).state.epoch >= first.state.epoch
        at_shared_redis.set(_SINCE, lost)
        assert not one.poll(RedisState()).settled
    at_shared_redis.flushall()
    assert not one.poll(RedisState()).settled


def test_another_server_that_is_behind_is_told_by_any_who_has_seen_more(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one = shared()
    first = one.poll(RedisState())
    for behind, epochs in ((500, 1), (60_000, 2)):
        _settle(at_shared_redis, first)
        known = one.poll(first.state).state
        assert one.poll(known).settled
        at_shared_redis.mset({f"{_ALL}seen": known.seen - behind, f"{_ALL}run": "another"})
        # The first poll comes from a process that has never seen the old server.
        assert not one.poll(RedisState()).settled
        now = one.poll(known)
        assert not now.settled
        assert len({known.epoch, now.state.epoch}) == epochs
        assert now.state.since > known.since


def test_all_gateways_that_anybody_knows_have_to_bring_what_they_have(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one = shared()
    known = RedisState()
    for name in ("a", "b"):
        look = one.poll(known, name)
        assert not look.is_complete
        look = one.poll(look.state, name, "whole", (look.state.epoch, look.dirty))
        assert look.is_complete
        known = look.state
    assert known.gateways == ("a", "b")
    _settle(at_shared_redis, look)
    assert one.poll(known).settled
    assert not one.poll(known, "a", "open").settled
    # A report is ignored if a write was refused after it, or if it names another epoch.
    before = one.poll(known, "a")
    said = one.poll(known, "a", "dirty")
    assert not one.poll(known, "a", "whole", (known.epoch, before.dirty)).settled
    assert not one.poll(known, "a", "whole", (known.epoch - 1, said.dirty)).settled
    assert one.poll(known, "a", "whole", (known.epoch, said.dirty)).settled
    at_shared_redis.flushall()
    assert not one.poll(known).settled
    empty = one.poll(known)
    _settle(at_shared_redis, empty)
    for name, is_settled in (("a", False), ("b", True)):
        told = (empty.state.epoch, 0)
        assert one.poll(empty.state, name, "whole", told).settled == is_settled
    # A gateway that has not polled for long is given up, and later removed.
    gone = b"1 %d" % (_now() - GATEWAY_TIMEOUT_MS - 1000)
    at_shared_redis.hset("conversations:{all}:gateways", mapping={"c": gone, "d": b"garbage"})
    assert one.poll(empty.state).settled
    assert one.poll(empty.state).state.gateways == ("a", "b")


def test_a_full_redis_is_not_settled_until_all_have_looked_again(
    shared: Callable[..., SharedConversations], at_shared_redis: redis.Redis
) -> None:
    one = shared()
    first = one.poll(RedisState())
    _settle(at_shared_redis, first)
    at_shared_redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.ResponseError, match="OOM"):
            one.put("t", [Record("resp_1", b"x")])
        full = one.poll(first.state)
        assert (full.state.epoch, full.settled) == (first.state.epoch, False)
    finally:
        at_shared_redis.config_set("maxmemory", 0)
    assert not one.poll(first.state).settled
    _settle(at_shared_redis, first)
    assert one.poll(first.state).settled
