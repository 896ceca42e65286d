"""Moving of keys and overrides that the release before stored, on disk and in a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.database.opening import make_database
from gateway.errors import DatabaseUnavailable
from gateway.former_state import keys as former_keys
from gateway.former_state import overrides as former_overrides
from gateway.former_state.move import FormerState, MoveCounts, RedisNotRead
from gateway.overrides.rows import read_overrides, write_override
from gateway.scheduling.override import Override
from gateway.tenancy.keys.record import KeyRecord, make_record
from gateway.tenancy.keys.rows import insert_keys, read_changed, read_uses, revoke_keys
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer
from tests.support.upgraded_database import create_tables

ADMIN = "sha256:" + "a" * 8
NOW = 1_800_000_000
REVISION = "@revision"


Open = Callable[[], Awaitable[Database]]


@pytest.fixture(params=["sqlite", "postgresql"])
async def open_database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Yield a function that opens the test's database once more, as another process does."""
    url = None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    opened: list[Database] = []

    async def open_once() -> Database:
        opened.append(_make_database(tmp_path, url))
        await opened[-1].open()
        return opened[-1]

    yield open_once
    for database in opened:
        await database.close()


@pytest.fixture
async def database(open_database: Open) -> Database:
    return await open_database()


def _make_database(folder: Path, url: str | None) -> Database:
    return make_database(folder, url, connections=1, timeout_s=PATIENCE_S, prepare=create_tables)


def _record(revoked: int | None = None, **fields: Any) -> KeyRecord:
    record, _ = make_record("acme", "a note", None, ADMIN)
    return record.model_copy(update={"revoked": revoked, **fields})


def _revoked(record: KeyRecord) -> KeyRecord:
    return record.model_copy(update={"revoked": NOW})


@dataclass
class Copy:
    """State of the release before: a copy of it, on disk or in Redis."""

    keys: Iterable[KeyRecord] = ()
    uses: Mapping[str, int] | None = None
    overrides: Mapping[str, dict[str, Any]] | None = None

    def write_disk(self, folder: Path) -> None:
        (folder / "@keys").mkdir(parents=True)
        (folder / "@replicas").mkdir()
        listed = [record.model_dump() for record in self.keys]
        (folder / "@keys" / "keys.json").write_text(json.dumps(listed, indent=1))
        if self.uses is not None:
            (folder / "@keys" / "used.json").write_text(json.dumps(self.uses))
        if self.overrides is not None:
            text = json.dumps(self.overrides, indent=1)
            (folder / "@replicas" / "overrides.json").write_text(text)

    def write_redis(self, client: redis.Redis) -> None:
        keys = {record.id: record.model_dump_json() for record in self.keys}
        client.hset(former_keys.KEYS, mapping={**keys, REVISION: "0123456789abcdef"})
        if self.uses is not None:
            client.hset(former_keys.USED, mapping=dict(self.uses))
        if self.overrides is not None:
            raw = {endpoint: json.dumps(each) for endpoint, each in self.overrides.items()}
            client.hset(former_overrides.KEY, mapping={**raw, REVISION: "0123456789abcdef"})


async def _keys(database: Database) -> dict[str, KeyRecord]:
    found = await database.read(partial(read_changed, after=0))
    return {record.id: record for record in found}


async def _dump(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    async def read(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
        return {
            table: sorted(map(tuple, await connection.fetch(f"SELECT * FROM {table}")), key=repr)
            for table in ("facts", "changes", "api_keys", "replica_overrides")
        }

    return await database.read(read)


async def test_all_is_copied_from_the_disk(database: Database, tmp_path: Path) -> None:
    live, ended = _record(expires=NOW), _record(revoked=NOW, note="the laptop 💻")
    uses = {live.id: 1200, ended.id: 600, "key_of_nobody": 60}
    drained = {"a:8001": {"drain": True}, "b:8001": {"weight": 2.5, "drain": False}}
    Copy([live, ended], uses, drained).write_disk(tmp_path)
    assert await FormerState(tmp_path, None).move(database) == MoveCounts(keys=2, overrides=2)
    assert await _keys(database) == {live.id: live, ended.id: ended}
    assert await database.read(read_uses) == {live.id: 1200}
    assert await database.read(read_overrides) == {
        "a:8001": Override(drain=True),
        "b:8001": Override(weight=2.5, drain=False),
    }


async def test_all_is_copied_from_redis(
    database: Database, tmp_path: Path, shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    live, ended = _record(expires=NOW), _record(revoked=NOW, note="the laptop 💻")
    uses = {live.id: 1200, ended.id: 600, "key_of_nobody": 60}
    Copy([live, ended], uses, {"a:8001": {"drain": True}}).write_redis(at_shared_redis)
    former = FormerState(tmp_path, shared_redis.url)
    assert await former.move(database) == MoveCounts(keys=2, overrides=1)
    assert await _keys(database) == {live.id: live, ended.id: ended}
    assert await database.read(read_uses) == {live.id: 1200}
    assert await database.read(read_overrides) == {"a:8001": Override(drain=True)}


async def test_a_key_that_is_revoked_in_one_of_two_copies_is_revoked(
    database: Database, tmp_path: Path, shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    live, here, there, on_disk, in_redis = (_record() for _ in range(5))
    disk = Copy([live, _revoked(here), there, on_disk], {live.id: 60, on_disk.id: 120})
    disk.write_disk(tmp_path)
    Copy([live, here, _revoked(there), in_redis], {live.id: 180}).write_redis(at_shared_redis)
    former = FormerState(tmp_path, shared_redis.url)
    assert await former.move(database) == MoveCounts(keys=5)
    ended = [_revoked(here), _revoked(there)]
    assert await _keys(database) == {each.id: each for each in (live, *ended, on_disk, in_redis)}
    assert await database.read(read_uses) == {live.id: 180, on_disk.id: 120}


@pytest.mark.parametrize(
    ("in_redis", "endpoints"),
    [
        ({"a:8001": {"drain": True}}, {"a:8001"}),
        ({}, set()),  # all were taken back, and only the revision is left
        (None, {"b:8001"}),
    ],
)
async def test_overrides_come_from_redis_if_it_has_them(
    database: Database,
    tmp_path: Path,
    shared_redis: RedisServer,
    at_shared_redis: redis.Redis,
    in_redis: dict[str, dict[str, Any]] | None,
    endpoints: set[str],
) -> None:
    Copy(overrides={"b:8001": {"drain": True}}).write_disk(tmp_path)
    Copy(overrides=in_redis).write_redis(at_shared_redis)
    await FormerState(tmp_path, shared_redis.url).move(database)
    assert (await database.read(read_overrides)).keys() == endpoints


async def test_nothing_changes_in_a_dry_run_and_in_a_second_one(
    database: Database, tmp_path: Path, shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    live, ended = _record(), _record()
    overrides = {"a:8001": {"drain": True}, "b:8001": {"weight": 3.0}}
    Copy([live, ended], {live.id: 60}, overrides).write_disk(tmp_path)
    Copy([_revoked(ended)], {live.id: 120}, overrides).write_redis(at_shared_redis)
    await database.write(partial(insert_keys, records=[ended]))
    before = await _dump(database)
    former = FormerState(tmp_path, shared_redis.url)
    expected = MoveCounts(keys=2, overrides=2)
    assert await former.move(database, dry_run=True) == expected
    assert await _dump(database) == before
    assert await former.move(database) == expected
    after = await _dump(database)
    assert await former.move(database) == MoveCounts(known=2)
    await FormerState(tmp_path, shared_redis.url).move_once(database)
    assert await _dump(database) == after


async def test_without_a_former_state_nothing_is_copied(
    database: Database, tmp_path: Path, shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    former = FormerState(tmp_path / "new", shared_redis.url)
    assert await former.move(database, dry_run=True) == MoveCounts()
    await former.move_once(database)
    assert await _keys(database) == {}
    assert not (tmp_path / "new").exists()
    assert not at_shared_redis.keys("*")
    # Later starts do not need Redis, which had nothing to copy.
    await FormerState(tmp_path / "new", f"{shared_redis.url}.none").move_once(database)


async def test_what_is_invalid_is_reported_and_the_rest_is_copied(
    database: Database,
    tmp_path: Path,
    shared_redis: RedisServer,
    at_shared_redis: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on_disk, in_redis, wrong = _record(), _record(), _record()
    overrides = {"a:8001": {"drain": True}, "b:8001": {"weight": -1}, "c:8001": {"speed": 1}}
    Copy([on_disk, wrong.model_copy(update={"created": -1})]).write_disk(tmp_path)
    Copy([in_redis], overrides=overrides).write_redis(at_shared_redis)
    hidden = wrong.hash.removeprefix("sha256:")
    damaged = {
        "not JSON": wrong.hash.encode(),
        "no record": json.dumps([wrong.hash]).encode(),
        "no hash": json.dumps(wrong.model_dump() | {"hash": hidden}).encode(),
        "not UTF-8": b"\xff" + wrong.hash.encode(),
        "too deep": b"[" * 5000 + hidden.encode(),
        "more fields": json.dumps(wrong.model_dump() | {"models": ["*"]}).encode(),
    }
    at_shared_redis.hset(former_keys.KEYS, mapping=damaged)  # type: ignore[arg-type]
    uses = {in_redis.id: "9" * 400, on_disk.id: "yesterday", b"\xff": "1"}
    at_shared_redis.hset(former_keys.USED, mapping=uses)  # type: ignore[arg-type]
    moved = await FormerState(tmp_path, shared_redis.url).move(database)
    assert (moved.keys, moved.overrides) == (2, 1)
    assert await _keys(database) == {on_disk.id: on_disk, in_redis.id: in_redis}
    assert (await database.read(read_overrides)).keys() == {"a:8001"}
    assert await database.read(read_uses) == {}
    by_copy = [problem.partition(": ")[0] for problem in moved.problems]
    assert sorted(by_copy) == [
        str(tmp_path / "@keys" / "keys.json"),
        *["Redis, api_keys"] * len(damaged),
        *("the override of b:8001", "the override of c:8001"),
    ]
    await FormerState(tmp_path, shared_redis.url).move_once(database)
    logged = [record.getMessage() for record in caplog.records]
    for problem in moved.problems:
        assert f"not moved to the database: {problem}" in logged
    # Errors of pydantic have the beginning of a value.
    assert hidden[:12] not in caplog.text + "".join(moved.problems)


@pytest.mark.parametrize("name", ["@keys/keys.json", "@replicas/overrides.json"])
@pytest.mark.parametrize("text", ["", "[{", '"text"', "3", "null", '{"a": 1}', "[1, 2]", "\x00"])
async def test_a_file_that_is_damaged_hides_no_other(tmp_path: Path, name: str, text: str) -> None:
    key = _record()
    Copy([key], overrides={"a:8001": {"drain": True}}).write_disk(tmp_path)
    (tmp_path / name).write_text(text)
    found = former_keys.read_keys(tmp_path, None)
    overrides, problems = former_overrides.read_overrides(tmp_path, None)
    assert [*found.problems, *problems], "nothing is reported"
    if name.startswith("@keys"):
        assert (found.records, len(overrides)) == ({}, 1)
    else:
        assert (found.records, overrides) == ({key.id: key}, {})


GOOD = _record().model_dump()
_ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(GOOD)), _ANY)
@example("hash", GOOD["hash"].upper())
@example("hash", "sha256:" + "0" * 64)
@example("expires", True)
@example("expires", "2100")
@example("revoked", False)
@example("tenant", "")
@example("note", "a\nb")
@example("models", ["*"])
def test_what_is_no_record_is_not_read_as_one(field: str, value: Any) -> None:
    with TemporaryDirectory() as name:
        Copy().write_disk(Path(name))
        file = Path(name) / "@keys" / "keys.json"
        file.write_bytes(json.dumps([GOOD | {field: value}]).encode("utf-8", "surrogatepass"))
        found = former_keys.read_keys(Path(name), None)
    if found.problems:
        assert found.records == {}
    else:
        [record] = found.records.values()
        assert record.model_dump() == GOOD | {field: value}


async def test_an_override_that_was_taken_back_does_not_return(
    database: Database, tmp_path: Path
) -> None:
    Copy(overrides={"a:8001": {"drain": True}, "b:8001": {"weight": 2.0}}).write_disk(tmp_path)
    await FormerState(tmp_path, None).move_once(database)
    await database.write(partial(write_override, endpoint="a:8001", override=None))
    changed = Override(weight=5.0)
    await database.write(partial(write_override, endpoint="b:8001", override=changed))
    await FormerState(tmp_path, None).move_once(database)
    assert await database.read(read_overrides) == {"b:8001": changed}


async def test_what_the_release_before_does_meanwhile_is_copied_at_the_next_start(
    database: Database, tmp_path: Path, shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    one, two, three = _record(), _record(), _record()
    Copy([one, two]).write_redis(at_shared_redis)
    await FormerState(tmp_path, shared_redis.url).move_once(database)
    await database.write(partial(revoke_keys, revoked={two.id: NOW}))
    Copy([_revoked(one), two, three], {three.id: 60}).write_redis(at_shared_redis)
    await FormerState(tmp_path, shared_redis.url).move_once(database)
    assert await _keys(database) == {
        one.id: _revoked(one),
        two.id: _revoked(two),
        three.id: three,
    }
    assert await database.read(read_uses) == {three.id: 60}


async def test_a_record_that_was_changed_in_redis_changes_no_key(
    database: Database, tmp_path: Path, shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    key = _record(expires=NOW)
    Copy([key]).write_redis(at_shared_redis)
    await FormerState(tmp_path, shared_redis.url).move_once(database)
    forged = key.model_copy(update={"expires": None, "tenant": "other"})
    Copy([forged]).write_redis(at_shared_redis)
    await FormerState(tmp_path, shared_redis.url).move_once(database)
    assert await _keys(database) == {key.id: key}


async def test_processes_that_start_at_once_copy_the_same_state(
    open_database: Open, tmp_path: Path
) -> None:
    records = [_record() for _ in range(100)]
    uses = {record.id: 60 for record in records}
    Copy(records, uses, {"a:8001": {"drain": True}}).write_disk(tmp_path)
    databases = [await open_database() for _ in range(4)]
    await asyncio.gather(*(FormerState(tmp_path, None).move_once(each) for each in databases))
    assert await _keys(databases[0]) == {record.id: record for record in records}
    assert await databases[0].read(read_uses) == uses
    assert await databases[0].read(read_overrides) == {"a:8001": Override(drain=True)}


async def test_redis_must_be_read_once(
    database: Database, tmp_path: Path, redis_server: RedisServer
) -> None:
    """A key that only Redis has would be refused. Later, the database has it."""
    on_disk, in_redis = _record(), _record()
    Copy([on_disk]).write_disk(tmp_path)
    redis_server.kill()
    former = FormerState(tmp_path, redis_server.url)
    with pytest.raises(RedisNotRead):
        await former.move(database)
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable) as refused:
            await former.move_once(database)
        assert "Redis" in refused.value.why
        assert redis_server.url not in refused.value.why + refused.value.message
    assert await _keys(database) == {}
    redis_server.start()
    with redis_server.client() as client:
        Copy([in_redis]).write_redis(client)
    await former.move_once(database)
    everything = {each.id: each for each in (on_disk, in_redis)}
    assert await _keys(database) == everything
    redis_server.kill()
    await FormerState(tmp_path, redis_server.url).move_once(database)
    assert await _keys(database) == everything


@pytest.mark.parametrize("key", [former_keys.KEYS, former_keys.USED, former_overrides.KEY])
async def test_a_value_of_another_type_in_redis_is_no_empty_state(
    database: Database,
    tmp_path: Path,
    shared_redis: RedisServer,
    at_shared_redis: redis.Redis,
    key: str,
) -> None:
    at_shared_redis.set(key, "a secret")
    with pytest.raises(DatabaseUnavailable) as refused:
        await FormerState(tmp_path, shared_redis.url).move_once(database)
    assert "a secret" not in refused.value.why


async def test_text_that_postgresql_cannot_store_is_reported(
    postgresql_url: str, tmp_path: Path
) -> None:
    key, wrong = _record(), _record(tenant="ac\0me")
    Copy([key, wrong], overrides={"a\0:8001": {"drain": True}}).write_disk(tmp_path)
    database = _make_database(tmp_path, postgresql_url)
    await database.open()
    try:
        moved = await FormerState(tmp_path, None).move(database)
        assert (moved.keys, moved.overrides, len(moved.problems)) == (1, 0, 2)
    finally:
        await database.close()
