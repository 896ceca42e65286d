"""Copies of issued keys on disk and in a real Redis: merging, trust and invalid data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config.settings import Settings
from gateway.errors import KeysUnavailable
from gateway.tenancy.access import Access
from gateway.tenancy.keys.copies import KeyCopies
from gateway.tenancy.keys.disk import KeyDisk
from gateway.tenancy.keys.issued import IssuedKeys
from gateway.tenancy.keys.record import KeyRecord, dump, join_records, make_record, parse_record
from gateway.tenancy.keys.shared import KEYS, USED, SharedKeys
from gateway.tenancy.unknown_models import UnknownModels
from gateway.troubles import Troubles
from tests.support.full_disk import full_disk
from tests.support.redis_server import RedisServer

ADMIN = "sha256:" + "a" * 8
NOW = 1_800_000_000


@pytest.fixture
def copies(shared_redis: RedisServer, tmp_path: Path) -> Iterator[Callable[..., KeyCopies]]:
    """Return a function that starts a gateway's copies with a disk of the given name."""
    made: list[KeyCopies] = []

    def start(name: str, shared: bool = True, workers: Path | None = None) -> KeyCopies:
        there = SharedKeys(shared_redis.url) if shared else None
        made.append(KeyCopies(KeyDisk(tmp_path / name), there, workers))
        with suppress(KeysUnavailable):
            made[-1].poll()
        return made[-1]

    yield start
    for one in made:
        one.close()


def _record(tenant: str = "acme") -> KeyRecord:
    return make_record(tenant, "", None, ADMIN)[0]


def _valid(copies: KeyCopies) -> set[str]:
    copies.poll()
    return {record.id for record in copies.records.values() if record.revoked is None}


def test_a_stale_disk_and_an_old_snapshot_bring_no_key_back(
    copies: Callable[..., KeyCopies], at_shared_redis: redis.Redis
) -> None:
    one, two = copies("one"), copies("two")
    kept, gone = _record(), _record()
    one.add(kept)
    one.add(gone)
    assert _valid(two) == {kept.id, gone.id}
    before: dict[Any, Any] = at_shared_redis.hgetall(KEYS)
    one.revoke(gone.id, NOW)
    at_shared_redis.delete(KEYS)
    at_shared_redis.hset(KEYS, mapping=before)
    # Gateway two's disk and Redis have the state before the revocation.
    assert _valid(one) == {kept.id}
    assert _valid(copies("two")) == {kept.id}
    assert _valid(copies("three")) == {kept.id}
    at_shared_redis.flushall()
    assert _valid(one) == {kept.id}
    assert _valid(copies("four")) == {kept.id}


def test_what_redis_lacks_is_told_once(
    copies: Callable[..., KeyCopies], at_shared_redis: redis.Redis
) -> None:
    """A gateway repairs a record once.

    Gateways must not overwrite each other's repairs for ever.
    """
    one, two, key = copies("one"), copies("two"), _record()
    one.add(key)
    two.poll()
    at_shared_redis.hset(KEYS, mapping={key.id: b"a newer release's", "@revision": "another"})
    for _ in range(3):
        for each in (one, two):
            each.poll()
    revision = at_shared_redis.hget(KEYS, "@revision")
    for each in (one, two, copies("three")):
        each.poll()
    assert at_shared_redis.hget(KEYS, "@revision") == revision


@pytest.mark.usefixtures("at_shared_redis")
def test_a_start_without_redis_trusts_nothing_but_its_siblings(
    copies: Callable[..., KeyCopies], shared_redis: RedisServer, tmp_path: Path
) -> None:
    workers = tmp_path / "workers"
    workers.mkdir()
    key = _record()
    copies("one", workers=workers).add(key)
    shared_redis.kill()
    try:
        assert not copies("one").trusted
        assert not copies("two").trusted
        sibling = copies("one", workers=workers)
        assert sibling.trusted
        assert set(sibling.records) == {key.id}
        with pytest.raises(KeysUnavailable):
            sibling.add(_record())
        assert set(sibling.records) == {key.id}
        with pytest.raises(KeysUnavailable, match="ended on this gateway"):
            sibling.revoke(key.id, NOW)
    finally:
        shared_redis.start()
    assert _valid(sibling) == set()
    assert _valid(copies("two")) == set()


def test_a_disk_that_fails_keeps_no_revoked_key_alive(
    copies: Callable[..., KeyCopies], at_shared_redis: redis.Redis, tmp_path: Path
) -> None:
    one, two = copies("one"), copies("two")
    key = _record()
    two.add(key)
    assert _valid(one) == {key.id}
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    two.revoke(key.id, NOW)
    with pytest.raises(OSError, match="No such file"):
        one.poll()
    assert one.records[key.id].revoked
    # A gateway whose disk fails can still revoke a key, through Redis.
    key = _record()
    two.add(key)
    with pytest.raises(OSError, match="No such file"):
        one.revoke(key.id, NOW)
    assert _valid(two) == set()


def test_a_key_ends_though_neither_disk_nor_redis_can_be_told(
    copies: Callable[..., KeyCopies], shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    one, two, key = copies("one"), copies("two"), _record()
    one.add(key)
    one.poll()
    before: dict[Any, Any] = at_shared_redis.hgetall(KEYS)
    shared_redis.kill()
    try:
        with full_disk(0), pytest.raises(OSError, match="File too large"):
            one.revoke(key.id, NOW)
        assert one.records[key.id].revoked
    finally:
        shared_redis.start()
    at_shared_redis.hset(KEYS, mapping=before)
    assert _valid(one) == set()
    assert _valid(two) == set()


def test_a_broken_file_is_no_key_and_stays_for_whoever_wants_to_look(
    copies: Callable[..., KeyCopies], at_shared_redis: redis.Redis, tmp_path: Path
) -> None:
    alone, one = copies("alone", shared=False), copies("one")
    alone.add(_record())
    one.add(key := _record())
    for name in ("alone", "one"):
        file = tmp_path / name / "keys.json"
        file.write_bytes(file.read_bytes()[:-10])
    assert copies("alone", shared=False).records == {}
    assert set(copies("one").records) == {key.id}
    assert (tmp_path / "alone" / "keys.broken").exists()
    assert (tmp_path / "one" / "keys.broken").exists()
    # A gateway that has read its file before still has the keys.
    assert _valid(one) == {key.id}
    assert len(_valid(alone)) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda client, _: client.set(KEYS, "not a hash"),
        lambda client, key: client.hset(KEYS, key, b"\xff" * 100),
        lambda client, key: client.hset(KEYS, key, b"[" * 5000),
        lambda client, key: client.hset(KEYS, key, dump(_record())),
        lambda client, key: client.hset(KEYS, "x" * 10_000, b"{}"),
    ],
)
def test_garbage_in_redis_turns_no_key_off_and_admits_nobody(
    copies: Callable[..., KeyCopies],
    at_shared_redis: redis.Redis,
    damage: Callable[[redis.Redis, str], object],
) -> None:
    one, key = copies("one"), _record()
    one.add(key)
    at_shared_redis.delete(KEYS)
    damage(at_shared_redis, key.id)
    with suppress(KeysUnavailable):  # the damaged value may be no hash
        one.poll()
    assert set(one.records) == {key.id}
    assert not copies("two").records.keys() - {key.id}


def test_a_revoked_key_takes_the_place_of_garbage(
    copies: Callable[..., KeyCopies], at_shared_redis: redis.Redis
) -> None:
    one, key = copies("one"), _record()
    one.add(key)
    at_shared_redis.hset(KEYS, key.id, b"garbage")
    one.revoke(key.id, NOW)
    assert parse_record(key.id, at_shared_redis.hget(KEYS, key.id) or b"").revoked == NOW


@pytest.mark.usefixtures("at_shared_redis")
def test_whoever_writes_late_brings_no_key_back(shared_redis: RedisServer) -> None:
    shared, key = SharedKeys(shared_redis.url), _record()
    shared.put([key.model_copy(update={"revoked": NOW})])
    shared.put([key, other := _record()])
    found = shared.read()
    assert found.records[key.id].revoked == NOW
    assert found.records[other.id] == other
    shared.close()


def test_the_last_use_is_the_latest_that_anybody_saw(
    copies: Callable[..., KeyCopies], at_shared_redis: redis.Redis
) -> None:
    one, two, key = copies("one"), copies("two"), _record()
    one.add(key)
    one.put_uses({key.id: 120, "key_of_nobody": 60})
    at_shared_redis.hset(USED, mapping={"x": "y", b"\xff": "9" * 400})
    two.poll()
    two.put_uses({key.id: 60})
    assert one.uses()[key.id] == 120
    one.put_uses({key.id: 180})
    assert two.uses()[key.id] == 180
    assert set(two.uses()) == {key.id, "key_of_nobody"}
    at_shared_redis.set(USED, "not a hash")
    assert one.uses() == {key.id: 180}


async def test_uses_that_redis_does_not_take_are_told_the_next_time(
    copies: Callable[..., KeyCopies], at_shared_redis: redis.Redis, tmp_path: Path
) -> None:
    access, key = Access(Settings(tokenizer_dir=tmp_path), UnknownModels(Troubles())), _record()
    at_shared_redis.set(USED, "not a hash")
    access.uses[key.id] = 120
    for _ in range(2):
        async with IssuedKeys(copies("one"), access):
            pass  # uses are written to Redis when the block ends
    assert access.uses == {key.id: 120}
    at_shared_redis.delete(USED)
    async with IssuedKeys(copies("one"), access):
        access.uses[key.id] = 180
    assert access.uses == {}
    assert copies("two").uses() == {key.id: 180}


@pytest.mark.usefixtures("at_shared_redis")
def test_uses_reach_redis_past_a_full_disk(copies: Callable[..., KeyCopies]) -> None:
    one, key = copies("one"), _record()
    with full_disk(1), pytest.raises(OSError, match="File too large"):
        one.put_uses({key.id: 120})
    assert copies("two").uses() == {key.id: 120}


GOOD = json.loads(dump(_record()))
ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(GOOD)), ANY)
@example("hash", GOOD["hash"].upper())
@example("hash", "sha256:" + "0" * 64)
@example("expires", True)
@example("expires", "2100")
@example("revoked", False)
@example("tenant", "")
@example("models", ["*"])
def test_what_is_no_record_is_not_read_as_one(field: str, value: Any) -> None:
    key_id = KeyRecord.model_validate(GOOD).id
    raw = json.dumps(GOOD | {field: value}).encode("utf-8", "surrogatepass")
    try:
        found = parse_record(key_id, raw)
    except ValueError:
        return
    assert json.loads(dump(found)) == GOOD | {field: value}


def test_copies_agree_in_whatever_order_they_meet() -> None:
    key, other = _record(), _record()
    ended = key.model_copy(update={"revoked": NOW})
    for order in itertools.permutations([key, ended, key, other, ended]):
        assert join_records({}, order) == {key.id: ended, other.id: other}
