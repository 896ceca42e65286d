"""Notices of deletions: a bounded stream per tenant, and the stream of the previous release."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from gateway.conversations import notices as notices_module
from gateway.conversations.notices import Deletion, max_notices
from gateway.conversations.record import DELETED, Record
from gateway.conversations.shared import RedisState, SharedConversations
from tests.support.redis_server import RedisServer

_BYTES = 2**20


@pytest.fixture
def shared(
    shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> Iterator[Callable[[], SharedConversations]]:
    made: list[SharedConversations] = []

    def make() -> SharedConversations:
        bounds = {"ttl_ms": 10**8, "tenant_bytes": _BYTES, "renew_ms": 10**7}
        made.append(SharedConversations(shared_redis.url, timeout_s=30, **bounds))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _delete(shared: SharedConversations, tenant: str, *ids: str) -> None:
    while not shared.put(tenant, [Record(id_, b"", DELETED) for id_ in ids]).done:
        pass


def _read(shared: SharedConversations) -> list[Deletion]:
    found: list[Deletion] = []
    while some := shared.read_deletions():
        found += some
    return found


def test_a_flood_of_one_tenant_evicts_no_notice_of_another(
    shared: Callable[[], SharedConversations], at_shared_redis: redis.Redis
) -> None:
    """A gateway that was away during 101,000 deletions still reads another tenant's notice."""
    one, away = shared(), shared()
    _delete(one, "quiet", "resp_secret")
    for start in range(0, 101_000, 500):
        _delete(one, "hostile", *[f"resp_{n}" for n in range(start, start + 500)])
    found = _read(away)
    assert Deletion("quiet", "resp_secret", False) in found
    assert Deletion("hostile", "resp_100999", False) in found
    kept = at_shared_redis.xlen("conversations:{.hostile}:gone")
    assert max_notices(_BYTES) <= kept <= max_notices(_BYTES) + 100
    assert len(found) == kept + 1
    assert at_shared_redis.memory_usage("conversations:{.hostile}:gone") < _BYTES // 4
    assert at_shared_redis.pttl("conversations:{.hostile}:gone") > 0
    assert at_shared_redis.zcard("conversations:{all}:gone") == 2


def test_tenants_take_turns(shared: Callable[[], SharedConversations]) -> None:
    """A busy tenant's notices do not delay those of other tenants."""
    one, reader = shared(), shared()
    _delete(one, "busy", *[f"resp_{n}" for n in range(900)])
    for name in ("a", "b"):
        _delete(one, name, "resp_1")
    first = [gone.tenant for _ in range(3) for gone in reader.read_deletions()]
    assert {"a", "b"} <= set(first)
    assert len(_read(reader)) + len(first) == 902
    _delete(one, "a", "resp_2")
    assert _read(reader) == [Deletion("a", "resp_2", False)]
    assert _read(reader) == []


def test_more_tenants_than_are_read_at_once(
    shared: Callable[[], SharedConversations], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices_module, "_TENANTS_AT_ONCE", 2)
    one, reader = shared(), shared()
    for n in range(7):
        _delete(one, f"t{n}", "resp_1")
    assert {gone.tenant for gone in _read(reader)} == {f"t{n}" for n in range(7)}


def test_a_deletion_and_its_notice_are_one_call(
    shared: Callable[[], SharedConversations],
    at_shared_redis: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway that dies before it announces a deletion loses no notice.

    The tenant's next deletion announces both.
    """

    def die(*_: object) -> None:
        raise redis.ConnectionError

    one, reader = shared(), shared()
    with monkeypatch.context() as patch:
        patch.setattr("gateway.conversations.tenant_records.announce", die)
        with pytest.raises(Exception, match="ConnectionError"):
            _delete(one, "t", "resp_1")
    assert one.get("t", ["resp_1"])["resp_1"].record.version == DELETED
    _delete(one, "t", "resp_2")
    assert [gone.id for gone in _read(reader)] == ["resp_1", "resp_2"]


def test_all_notices_are_read_again_where_redis_may_have_lost_some(
    shared: Callable[[], SharedConversations], at_shared_redis: redis.Redis
) -> None:
    """A gateway reads all notices again after a failover.

    The new primary may have other notices with the timestamps that were already read.
    """
    one, reader = shared(), shared()
    _delete(one, "t", "resp_1")
    known = reader.poll(RedisState()).state
    assert [gone.id for gone in _read(reader)] == ["resp_1"]
    at_shared_redis.delete("conversations:{.t}:gone", "conversations:{all}:gone")
    at_shared_redis.xadd("conversations:{.t}:gone", {"i": "resp_2"}, id="1-1")
    at_shared_redis.zadd("conversations:{all}:gone", {"t": 1})
    assert _read(reader) == []
    at_shared_redis.set("conversations:{all}:run", "another")
    reader.poll(known)
    assert [gone.id for gone in _read(reader)] == ["resp_2"]


def test_what_a_gateway_of_the_release_before_deletes_is_read(
    shared: Callable[[], SharedConversations], at_shared_redis: redis.Redis
) -> None:
    reader = shared()
    old = "conversations:{all}:deleted"
    at_shared_redis.xadd(old, {"t": "a", "i": "resp_1"})
    at_shared_redis.xadd(old, {"t": "b", "u": "conv_1"})
    at_shared_redis.xadd(old, {"t": "b", "i": "not/ an id"})
    assert _read(reader) == [Deletion("a", "resp_1", False), Deletion("b", "conv_1", True)]
    at_shared_redis.xadd(old, {"t": "a", "i": "resp_2"})
    assert _read(reader) == [Deletion("a", "resp_2", False)]
