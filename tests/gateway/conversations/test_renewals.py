"""Renewals of a conversation's time to live in batches, with other changes between the batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from gateway.conversations.record import DELETED, FINAL, OVERHEAD_BYTES, Record
from gateway.conversations.shared import SharedConversations
from tests.support.redis_server import RedisServer

_TTL_MS = 10**9
_RENEW_MS = _TTL_MS // 10
_ITEMS = 600  # renewed in three batches
_BYTES = 2 * (_ITEMS + 10) * (OVERHEAD_BYTES + 100)
_PREFIX = "conversations:{.t}:"
_UNIT = "conv_1"


@contextmanager
def _shared(server: RedisServer) -> Iterator[SharedConversations]:
    bounds = {"ttl_ms": _TTL_MS, "tenant_bytes": _BYTES, "renew_ms": _RENEW_MS}
    one = SharedConversations(server.url, timeout_s=30, **bounds)
    try:
        yield one
    finally:
        one.close()


class _Conversation:
    """A stored conversation that is due for renewal, with the state it should have."""

    def __init__(self, shared: SharedConversations, at_redis: redis.Redis, age: float) -> None:
        self._shared = shared
        self._at_redis = at_redis
        self._old = int(time.time() * 1000 - age * _TTL_MS)
        self._version = 1
        self._spent: set[str] = set()
        self.items = {f"m{n}" for n in range(_ITEMS)}
        self.has_head = True
        self._longest_put_ms = 0.0
        items = [Record(f"m{n}", b"x" * 100, FINAL, _UNIT, n) for n in range(_ITEMS)]
        self._put([Record(_UNIT, b"head"), *items], used_ms=self._old)
        self._when = time.time_ns() // 10**6
        self._after: bytes | None = b""

    def _put(self, records: list[Record], **options: int) -> bool:
        started = time.monotonic()
        done = self._shared.put("t", records, **options).done
        self._longest_put_ms = max(self._longest_put_ms, 1000 * (time.monotonic() - started))
        return done

    def renew(self, pieces: int) -> None:
        """Renew the next `pieces` batches."""
        for _ in range(pieces):
            if self._after is not None:
                unit, when = _UNIT.encode(), self._when
                self._after = (
                    self._shared.renew_some(self._at_redis, "t", unit, when, self._after) or None
                )

    def happen(self, event: str, number: int) -> None:
        name = f"m{number}"
        if event in ("add", "bring") and self.has_head and name not in self._spent | self.items:
            record = Record(name, b"y", FINAL, _UNIT, max(0, number))
            self._put([record], used_ms=self._old if event == "bring" else -1)
            self.items.add(name)
        elif event == "delete":
            self._put([Record(name, b"", DELETED)])
            self._spend(name)
        elif event == "move" and name in self.items:
            self._put([Record(name, b"z", FINAL + 1, "conv_2", 1)])
            self._spend(name)
        elif event == "read":
            self._shared.get("t", [_UNIT, name])
        elif event == "update" and self.has_head:
            self._version += 1
            self._put([Record(_UNIT, b"other", self._version)])
        elif event == "evict":
            large = Record(f"resp_{number}", bytes(_BYTES - 3 * OVERHEAD_BYTES), FINAL)
            while not self._put([large]):
                pass
            self._spent |= self.items
            self.items, self.has_head = set(), False

    def _spend(self, name: str) -> None:
        self._spent.add(name)
        self.items.discard(name)

    def check(self) -> None:
        """Assert that exactly the expected items are stored. None may expire before the head."""
        members = self._at_redis.zrange(f"{_PREFIX}g:{_UNIT}", 0, -1)
        assert {member[21:].decode() for member in members} == self.items
        assert self._at_redis.exists(f"{_PREFIX}r:{_UNIT}") == self.has_head
        spent = self._at_redis.mget([f"{_PREFIX}r:{name}" for name in ["", *self._spent]])
        assert not [raw for raw in spent if raw and f" {_UNIT}\n".encode() in raw]
        used = self._at_redis.zscore(f"{_PREFIX}used", _UNIT)
        assert (used is not None) == self.has_head
        if used is not None:
            now = time.time_ns() // 10**6
            times = self._at_redis.pipeline(transaction=False)
            for name in self.items:
                times.pttl(f"{_PREFIX}r:{name}")
            left = [now + each for each in times.execute()]
            head = now + self._at_redis.pttl(f"{_PREFIX}r:{_UNIT}")
            whole = now + self._at_redis.pttl(f"{_PREFIX}g:{_UNIT}")
            # Allow a tolerance: times are rounded to ms and read one after another. A put measures
            # from its start, but Redis from the moment it stores the record.
            slack = 2 + time.time_ns() // 10**6 - now + self._longest_put_ms
            assert min([*left, whole]) >= head - slack
            assert whole >= max([*left, 0]) - slack
            assert abs(head - (used + _TTL_MS)) <= slack


_EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["add", "bring", "delete", "move", "read", "update", "evict"]),
        st.integers(-5, _ITEMS + 5),
    ),
    max_size=6,
)


@given(events=_EVENTS, pieces=st.integers(0, 4), age=st.sampled_from([0.2, 0.9]))
def test_nothing_is_lost_or_returns_whatever_happens_between_pieces(
    shared_redis: RedisServer, events: list[tuple[int, str, int]], pieces: int, age: float
) -> None:
    """A process may die after any batch. The next read then renews the entire conversation."""
    with shared_redis.client() as at_redis, _shared(shared_redis) as shared:
        at_redis.flushall()
        conversation = _Conversation(shared, at_redis, age)
        for before, event, number in events:
            conversation.renew(before)
            conversation.happen(event, number)
            conversation.check()
        conversation.renew(pieces)
        conversation.check()
        shared.get("t", [_UNIT])
        conversation.check()
        if conversation.has_head:
            left = at_redis.pttl(f"{_PREFIX}r:{_UNIT}")
            assert left > _TTL_MS - _RENEW_MS - 60_000


def test_a_renewal_that_is_cut_leaves_the_unit_as_old_as_it_was(
    shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    """Expiry and eviction order of a conversation do not change before the last batch."""
    with _shared(shared_redis) as shared:
        conversation = _Conversation(shared, at_shared_redis, 0.5)
        used = at_shared_redis.zscore(f"{_PREFIX}used", _UNIT)
        conversation.renew(2)
        assert at_shared_redis.zscore(f"{_PREFIX}used", _UNIT) == used
        assert at_shared_redis.pttl(f"{_PREFIX}r:{_UNIT}") <= _TTL_MS // 2
        conversation.renew(1)
        assert at_shared_redis.pttl(f"{_PREFIX}r:{_UNIT}") > _TTL_MS * 0.9


def test_where_redis_takes_no_writes_members_are_not_renewed_in_vain(
    shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    with _shared(shared_redis) as shared:
        _Conversation(shared, at_shared_redis, 0.5)
        at_shared_redis.config_set("maxmemory", 1)
        try:
            at_shared_redis.config_resetstat()
            assert shared.get("t", [_UNIT])
            calls = at_shared_redis.info("commandstats")
            assert "cmdstat_pexpireat" not in calls
        finally:
            at_shared_redis.config_set("maxmemory", 0)


def test_a_large_value_is_read_whole_while_it_is_replaced(
    shared_redis: RedisServer, at_shared_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read returns one complete version, although puts replace the record during the read."""
    large = {"ttl_ms": _TTL_MS, "tenant_bytes": 10**8, "renew_ms": _RENEW_MS}
    shared = SharedConversations(shared_redis.url, timeout_s=30, **large)
    sizes = [3 * 2**20, 3 * 2**20, 5 * 2**20, 10**6, 10**6, 9]
    values = [bytes([65 + n]) * size for n, size in enumerate(sizes)]

    def put(version: int) -> None:
        shared.put("t", [Record("resp_1", values[version], version)])

    def replacing(read: Callable[..., bytes]) -> Callable[..., bytes]:
        def part(*arguments: object) -> bytes:
            raw = read(*arguments)
            if later:
                put(later.pop(0))
            return raw

        return part

    all_later = list(range(1, len(values)))
    pairs = [(start, [end]) for end in all_later for start in range(end)]
    for start, following in [*pairs, (0, all_later)]:
        later = list(following)
        at_shared_redis.flushall()
        put(start)
        with monkeypatch.context() as patch:
            for name in ("hget", "getrange"):
                patch.setattr(redis.Redis, name, replacing(getattr(redis.Redis, name)))
            found = shared.get("t", ["resp_1"])["resp_1"].record
        assert found.data == values[found.version]
    shared.close()
