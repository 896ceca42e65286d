"""Rows of issued keys in SQLite and PostgreSQL, and the processes that read and change them."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config.file import Configuration
from gateway.config.settings import Settings
from gateway.config.tenants import Tenant, key_hash
from gateway.database.changes import ChangeFeed
from gateway.database.connection import Connection
from gateway.database.database import Database, Query
from gateway.database.opening import make_database
from gateway.database.sharing import Sharing
from gateway.errors import DatabaseUnavailable, InvalidKey, KeyNotFound
from gateway.tenancy.access import Access
from gateway.tenancy.keys import issued
from gateway.tenancy.keys.issued import IssuedKeys
from gateway.tenancy.keys.record import MAX_NOTE_CHARS, KeyRecord, join_records, make_record
from gateway.tenancy.keys.rows import (
    CHANGES,
    insert_keys,
    read_changed,
    read_uses,
    revoke_keys,
    write_uses,
)
from gateway.tenancy.unknown_models import UnknownModels
from gateway.troubles import Troubles
from tests.support.adapter_store import becomes
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import PostgresqlServer
from tests.support.upgraded_database import create_tables, upgrade_database

ADMIN = "sha256:" + "a" * 8
NOW = 1_800_000_000
OF_THE_FILE = "sk-of-the-file"
ONLY_HERE = "The key is revoked in the process"
T = TypeVar("T")


class Place(NamedTuple):
    """A new database: a folder for SQLite, or the URL of PostgreSQL."""

    folder: Path
    url: str | None

    def make(self) -> Database:
        return make_database(
            self.folder, self.url, connections=1, timeout_s=PATIENCE_S, prepare=create_tables
        )


NewPlace = Callable[[], AbstractContextManager[Place]]
Open = Callable[[], Awaitable[Database]]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def new_place(request: pytest.FixtureRequest) -> Iterator[NewPlace]:
    """Yield a context manager that makes an empty database."""

    @contextmanager
    def make_sqlite() -> Iterator[Place]:
        with tempfile.TemporaryDirectory() as name:
            yield Place(Path(name), None)

    if request.param == "sqlite":
        yield make_sqlite
        return
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    with server.database() as url:
        upgrade_database(url)

        # Emptying the tables takes a fifth of the time of creating a database.
        @contextmanager
        def empty_postgresql() -> Iterator[Place]:
            yield Place(Path(), url)
            server.execute("TRUNCATE api_keys, changes", url.rpartition("/")[2])

        yield empty_postgresql


@pytest.fixture
async def open_database(new_place: NewPlace) -> AsyncIterator[Open]:
    """Yield a function that opens the test's database once more, as another process does."""
    opened: list[Database] = []
    with new_place() as place:

        async def open_once() -> Database:
            opened.append(place.make())
            await opened[-1].open()
            return opened[-1]

        yield open_once
        for database in opened:
            await database.close()


@pytest.fixture
async def database(open_database: Open) -> Database:
    return await open_database()


def _record(**fields: Any) -> KeyRecord:
    return make_record("acme", "", None, ADMIN)[0].model_copy(update=fields)


async def _insert(database: Database, *records: KeyRecord) -> None:
    await database.write(partial(insert_keys, records=records))


async def _revoke(database: Database, **revoked: int) -> None:
    await database.write(partial(revoke_keys, revoked=revoked))


async def _read(database: Database, after: int = 0) -> dict[str, KeyRecord]:
    found = await database.read(partial(read_changed, after=after))
    return {record.id: record for record in found}


async def _number(database: Database) -> int:
    return await database.read(_read_number)


async def _read_number(connection: Connection) -> int:
    sql = "SELECT number FROM changes WHERE name = $1"
    return await connection.fetch_value(sql, CHANGES) or 0


_TIMES = st.integers(0, 2**40 - 1)
_HEX = "0123456789abcdef"
_RECORDS = st.builds(
    KeyRecord,
    hash=st.text(_HEX, min_size=64, max_size=64).map("sha256:{}".format),
    tenant=st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", fullmatch=True),
    note=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=MAX_NOTE_CHARS),
    created=_TIMES,
    created_by=st.text(_HEX, min_size=8, max_size=8).map("sha256:{}".format),
    expires=st.none() | _TIMES,
    revoked=st.none() | _TIMES,
)


@given(st.lists(_RECORDS, max_size=5, unique_by=lambda record: record.id))
def test_rows_have_what_was_stored(new_place: NewPlace, records: list[KeyRecord]) -> None:
    async def work(place: Place) -> None:
        database = place.make()
        await database.open()
        for _ in range(2):
            await _insert(database, *records)
            assert await _read(database) == {record.id: record for record in records}
        await database.close()

    with new_place() as place:
        asyncio.run(work(place))


async def test_a_row_changes_only_when_its_key_is_revoked(database: Database) -> None:
    key, other = _record(note="first"), _record(revoked=NOW)
    await _insert(database, key, other)
    forged = key.model_copy(update={"note": "second", "tenant": "other", "expires": NOW})
    revived = other.model_copy(update={"revoked": None})
    await _insert(database, forged, revived)
    assert await _read(database) == {key.id: key, other.id: other}
    ended = key.model_copy(update={"revoked": NOW + 1})
    await _insert(database, ended, other.model_copy(update={"revoked": NOW + 1}))
    assert await _read(database) == {key.id: ended, other.id: other}
    await _revoke(database, **{key.id: NOW + 2, other.id: NOW + 2, "key_of_nobody": NOW})
    assert await _read(database) == {key.id: ended, other.id: other}


async def test_only_later_changes_are_read(database: Database) -> None:
    first, second, third = _record(), _record(), _record()
    await _insert(database, first)
    before = await _number(database)
    await _insert(database, second, third)
    assert (await _read(database, before)).keys() == {second.id, third.id}
    before = await _number(database)
    assert await _read(database, before) == {}
    await _revoke(database, **{first.id: NOW, third.id: NOW})
    ended = [each.model_copy(update={"revoked": NOW}) for each in (first, third)]
    assert await _read(database, before) == {each.id: each for each in ended}


async def test_a_later_change_waits_for_an_earlier_one(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    """A process that has seen the later change's number would never read the earlier change."""
    one, two, reader = (Place(Path(), postgresql_url).make() for _ in range(3))
    for each in (one, two, reader):
        await each.open()
    first, second = _record(), _record()
    is_inserted, is_released = asyncio.Event(), asyncio.Event()

    async def insert_slowly(connection: Connection) -> None:
        await insert_keys(connection, [first])
        is_inserted.set()
        await is_released.wait()

    slow = asyncio.create_task(one.write(insert_slowly))
    await is_inserted.wait()
    quick = asyncio.create_task(_insert(two, second))
    name = postgresql_url.rpartition("/")[2]
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        f" WHERE datname = '{name}' AND wait_event_type = 'Lock'"
    )
    await becomes(lambda: postgresql.execute(waiting) == "1")
    assert (await _number(reader), await _read(reader)) == (0, {})
    is_released.set()
    await asyncio.gather(slow, quick)
    assert await _read(reader) == {first.id: first, second.id: second}
    assert (await _read(reader, 1)).keys() == {second.id}
    for each in (one, two, reader):
        await each.close()


async def test_the_last_use_is_the_latest_that_any_process_saw(open_database: Open) -> None:
    one, two = await open_database(), await open_database()
    key, other, ended = _record(), _record(), _record()
    await _insert(one, key, other, ended)
    await one.write(partial(write_uses, uses={key.id: 120, ended.id: 120, "key_of_nobody": 60}))
    await two.write(partial(write_uses, uses={key.id: 60, other.id: 60}))
    await _revoke(one, **{ended.id: NOW})
    assert await one.read(read_uses) == {key.id: 120, other.id: 60}
    before = await _number(one)
    await one.write(partial(write_uses, uses={key.id: 180}))
    assert await two.read(read_uses) == {key.id: 180, other.id: 60}
    assert await _number(one) == before, "other processes would read the keys again"


async def test_processes_store_many_uses_at_once(open_database: Open) -> None:
    """Two transactions that update rows in different orders would wait for each other."""
    databases = [await open_database() for _ in range(2)]
    records = [_record() for _ in range(200)]
    await _insert(databases[0], *records)
    for minute in range(5):
        uses = {record.id: minute for record in records}
        backwards = dict(reversed(uses.items()))
        await asyncio.gather(
            databases[0].write(partial(write_uses, uses=uses)),
            databases[1].write(partial(write_uses, uses=backwards)),
        )
    assert set((await databases[0].read(read_uses)).values()) == {4}


def test_records_are_joined_in_any_order() -> None:
    key, other = _record(), _record()
    ended = key.model_copy(update={"revoked": NOW})
    for order in itertools.permutations([key, ended, key, other, ended]):
        assert join_records({}, order) == {key.id: ended, other.id: other}


class _Link:
    """A process' connection to a real database, which a test cuts. It has the methods of Database.

    Attributes:
        is_up: False if calls fail without reaching the database.
        loses_answers: True if changes are made, but their answers are lost.
        is_free: While this event is not set, changes wait.
        waiting: Number of changes that wait for `is_free`.
    """

    is_shared = True

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_up = True
        self.loses_answers = False
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.waiting = 0

    @property
    def problem(self) -> str:
        return "" if self.is_up else "refused"

    async def close(self) -> None:
        await self._database.close()

    async def read(self, query: Query[T]) -> T:
        self._check()
        return await self._database.read(query)

    async def write(self, change: Query[T]) -> T:
        self._check()
        self.waiting += 1
        try:
            await self.is_free.wait()
        finally:
            self.waiting -= 1
        found = await self._database.write(change)
        if self.loses_answers:
            raise DatabaseUnavailable("the answer is lost")
        return found

    def _check(self) -> None:
        if not self.is_up:
            raise DatabaseUnavailable("refused")


async def _do_nothing() -> None:
    pass


class _Process:
    """The keys of a gateway process, which reads changes when the test polls."""

    def __init__(self, link: _Link, before_first: Callable[[], Awaitable[None]]) -> None:
        self.link = link
        database = cast(Database, link)
        self.access = Access(Settings(tokenizer_dir=Path()), UnknownModels(Troubles()))
        acme = Tenant(name="acme", keys=[key_hash(OF_THE_FILE)], models=["*"])
        self.access.update(Configuration(tenants=[acme]))
        self.keys = IssuedKeys(database, Sharing(database, None), self.access, before_first)
        self._feed = ChangeFeed(database)
        self._feed.subscribe(CHANGES, self.keys.refresh)
        self._following = asyncio.create_task(self.keys.follow(Troubles()))

    async def poll(self) -> None:
        await self._feed.poll()

    async def end(self) -> None:
        self._following.cancel()
        await asyncio.wait([self._following])
        await self.keys.close()

    def answer(self, key: str) -> str:
        """Return "accepted", "refused" or "unavailable" for a request with this key."""
        try:
            self.access.tenant([f"Bearer {key}"])
        except InvalidKey:
            return "refused"
        except DatabaseUnavailable:
            return "unavailable"
        return "accepted"

    async def add(self) -> tuple[str, str]:
        """Add a key. Return its id and the key."""
        record, key = make_record("acme", "", None, ADMIN)
        await self.keys.add(record)
        return record.id, key


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes write pending revocations a thousand times a second."""
    monkeypatch.setattr(issued, "POLL_INTERVAL_S", 0.001)


Start = Callable[..., Awaitable[_Process]]


@pytest.fixture
async def start(open_database: Open, often: None) -> AsyncIterator[Start]:
    """Yield a function that starts a process, which then polls once."""
    started: list[_Process] = []

    async def start_process(
        *, is_up: bool = True, before_first: Callable[[], Awaitable[None]] = _do_nothing
    ) -> _Process:
        link = _Link(await open_database())
        link.is_up = is_up
        started.append(_Process(link, before_first))
        await started[-1].poll()
        return started[-1]

    yield start_process
    for process in started:
        await process.end()


async def _is_refused(process: _Process, key: str) -> None:
    """Poll until the process refuses the key."""
    async with asyncio.timeout(PATIENCE_S):
        while process.answer(key) != "refused":
            await process.poll()
            await asyncio.sleep(0)


async def test_a_process_that_cannot_load_keys_yet_refuses_none_of_them(start: Start) -> None:
    one = await start()
    _, key = await one.add()
    late = await start(is_up=False)
    assert [late.answer(each) for each in (key, "sk-guess", OF_THE_FILE)] == [
        *("unavailable", "unavailable", "accepted")
    ]
    assert "not accepted yet: refused" in late.keys.problem
    with pytest.raises(DatabaseUnavailable):
        _ = late.keys.records
    with pytest.raises(DatabaseUnavailable):
        await late.add()
    late.link.is_up = True
    await late.poll()
    assert [late.answer(each) for each in (key, "sk-guess")] == ["accepted", "refused"]
    assert late.keys.problem == ""


async def test_keys_are_loaded_after_the_former_state_is_there(start: Start) -> None:
    failures = [DatabaseUnavailable("Redis: refused")] * 2

    async def fail_twice() -> None:
        if failures:
            raise failures.pop()

    _, key = await (await start()).add()
    late = await start(before_first=fail_twice)
    assert late.answer(key) == "unavailable"
    assert "Redis: refused" in late.keys.problem
    await late.poll()
    assert late.answer(key) == "unavailable"
    await late.poll()
    assert (late.answer(key), late.keys.problem) == ("accepted", "")


async def test_a_key_is_revoked_where_the_database_is_down_and_later_everywhere(
    start: Start,
) -> None:
    one, two = await start(), await start()
    key_id, key = await one.add()
    await two.poll()
    one.link.is_up = False
    with pytest.raises(DatabaseUnavailable) as refused:
        await one.keys.revoke(key_id)
    assert refused.value.message.startswith(ONLY_HERE)
    await two.poll()
    assert (one.answer(key), two.answer(key)) == ("refused", "accepted")
    assert one.keys.find(key_id) is None
    assert one.keys.records == []
    one.link.is_up = True
    await one.poll()
    assert one.answer(key) == "refused"
    await _is_refused(two, key)
    assert (await start()).answer(key) == "refused"


async def test_a_key_of_another_process_is_revoked_before_it_was_seen(start: Start) -> None:
    one, two = await start(), await start()
    key_id, key = await one.add()
    assert two.answer(key) == "refused"
    await two.keys.revoke(key_id)
    await one.poll()
    await two.poll()
    assert (one.answer(key), two.answer(key)) == ("refused", "refused")
    with pytest.raises(KeyNotFound):
        await two.keys.revoke("key_" + "0" * 24)


async def test_a_client_that_leaves_does_not_stop_a_revocation(start: Start) -> None:
    one, two = await start(), await start()
    key_id, key = await one.add()
    await two.poll()
    one.link.is_free.clear()
    request = asyncio.create_task(one.keys.revoke(key_id))
    await becomes(lambda: one.link.waiting)
    request.cancel()
    await asyncio.wait([request])
    assert (request.cancelled(), one.answer(key)) == (True, "refused")
    one.link.is_free.set()
    await _is_refused(two, key)


async def test_a_restored_backup_ends_keys_that_are_newer(start: Start) -> None:
    one = await start()
    old_id, old = await one.add()
    rows = await _copy(one.link)
    _, new = await one.add()
    await one.poll()
    assert one.answer(new) == "accepted"
    await _restore(one.link, rows)
    await one.poll()
    assert (one.answer(old), one.answer(new)) == ("accepted", "refused")
    assert [record.id for record in one.keys.records] == [old_id]
    _, newest = await one.add()
    assert (await start()).answer(newest) == "accepted"


async def test_a_restored_backup_brings_no_key_back_where_it_was_revoked(start: Start) -> None:
    one, two = await start(), await start()
    key_id, key = await one.add()
    await two.poll()
    rows = await _copy(one.link)
    await two.keys.revoke(key_id)
    await one.poll()
    await _restore(one.link, rows)
    await one.poll()
    assert one.answer(key) == "refused"
    await _is_refused(await start(), key)


Tables = dict[str, list[tuple[Any, ...]]]


async def _copy(link: _Link) -> Tables:
    async def read(connection: Connection) -> Tables:
        return {
            table: list(map(tuple, await connection.fetch(f"SELECT * FROM {table}")))
            for table in ("api_keys", "changes")
        }

    return await link.read(read)


async def _restore(link: _Link, tables: Tables) -> None:
    async def write(connection: Connection) -> None:
        for table, rows in tables.items():
            await connection.fetch(f"DELETE FROM {table}")
            values = ", ".join(f"${number}" for number in range(1, len(rows[0]) + 1))
            await connection.execute_many(f"INSERT INTO {table} VALUES ({values})", rows)

    await link.write(write)


async def test_a_row_that_is_no_key_hides_no_other(start: Start) -> None:
    one = await start()
    damaged_id, damaged = await one.add()
    _, key = await one.add()

    async def damage(connection: Connection) -> None:
        await connection.fetch("UPDATE api_keys SET created = -1 WHERE id = $1", damaged_id)

    await one.link.write(damage)
    late = await start()
    assert (late.answer(damaged), late.answer(key)) == ("refused", "accepted")


async def test_uses_that_cannot_be_stored_are_stored_later(start: Start) -> None:
    one = await start()
    key_id, key = await one.add()
    assert one.answer(key) == "accepted"
    used = one.access.uses[key_id]
    one.link.is_up = False
    await one.keys.close()
    assert one.access.uses == {key_id: used}
    one.access.uses[key_id] = used + 60
    one.link.is_up = True
    await one.keys.close()
    assert one.access.uses == {}
    one.access.uses[key_id] = used  # an older time, as of a process whose clock is behind
    await one.keys.close()
    assert await (await start()).keys.uses() == {key_id: used + 60}


_PROCESSES = 3


class Action(NamedTuple):
    """An action in one of several processes. `key` is the number of a key, for a revocation."""

    name: str
    process: int
    key: int = 0


class _Incarnation(NamedTuple):
    """A process from its start to its end, and what the test has seen of it.

    Attributes:
        process: The process.
        accepted: Ids of keys that it has accepted.
        ended: Ids of keys that it must refuse from now on.
        pending: Ids of keys whose revocation the database may lack.
    """

    process: _Process
    accepted: set[str]
    ended: set[str]
    pending: set[str]


class _World:
    """Several processes over one database, and what their answers must be."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running: list[_Incarnation] = []
        self._keys: dict[str, str] = {}
        self._made: set[str] = set()
        self._attempted: set[str] = set()
        """Ids of keys that a process was asked to revoke."""
        self._ended: set[str] = set()
        """Ids of keys that are revoked in the database."""

    async def play(self, rounds: list[list[Action]]) -> None:
        try:
            for _ in range(_PROCESSES):
                self._running.append(await self._start())
            for actions in rounds:
                await self._play_round(actions)
            await self._agree()
        finally:
            for running in self._running:
                await self._end(running)

    async def _play_round(self, actions: list[Action]) -> None:
        made, ended = self._made - self._attempted, set(self._ended)
        for action in actions:
            await self._disturb(action)
        await asyncio.gather(*map(self._act, actions))
        polled = {action.process for action in actions if action.name == "poll"}
        for number, running in enumerate(self._running):
            self._check(running)
            if number in polled and running.process.link.is_up:
                self._check_polled(running, made - self._attempted, ended)

    async def _start(self, is_up: bool = True) -> _Incarnation:
        database = self._place.make()
        await database.open()
        link = _Link(database)
        link.is_up = is_up
        return _Incarnation(_Process(link, _do_nothing), set(), set(), set())

    async def _end(self, running: _Incarnation) -> None:
        await running.process.end()
        await running.process.link.close()

    async def _disturb(self, action: Action) -> None:
        running = self._running[action.process]
        link = running.process.link
        match action.name:
            case "cut":
                link.is_up = False
            case "lose answers":
                link.loses_answers = True
            case "mend":
                link.is_up, link.loses_answers = True, False
            case "restart":
                await self._end(running)
                self._running[action.process] = await self._start(link.is_up)

    async def _act(self, action: Action) -> None:
        running = self._running[action.process]
        match action.name:
            case "poll":
                await running.process.poll()
            case "add":
                await self._add(running)
            case "revoke" if self._keys:
                await self._revoke(running, list(self._keys)[action.key % len(self._keys)])

    async def _add(self, running: _Incarnation) -> None:
        record, self._keys[record.id] = make_record("acme", "", None, ADMIN)
        try:
            await running.process.keys.add(record)
        except DatabaseUnavailable:
            return
        self._made.add(record.id)

    async def _revoke(self, running: _Incarnation, key_id: str) -> None:
        was_made = key_id in self._made
        self._attempted.add(key_id)
        try:
            await running.process.keys.revoke(key_id)
        except KeyNotFound:
            assert not was_made
        except DatabaseUnavailable as error:
            if error.message.startswith(ONLY_HERE):
                running.ended.add(key_id)
                running.pending.add(key_id)
        else:
            running.ended.add(key_id)
            self._ended.add(key_id)

    def _check(self, running: _Incarnation) -> None:
        """Assert that no key is accepted again after the process has ceased to accept it."""
        for key_id, key in self._keys.items():
            answer = running.process.answer(key)
            if answer == "accepted":
                assert key_id not in running.ended
                running.accepted.add(key_id)
            elif key_id in running.accepted:
                assert answer == "refused"
                assert key_id in self._attempted
                running.ended.add(key_id)
        assert running.process.answer(OF_THE_FILE) == "accepted"

    def _check_polled(self, running: _Incarnation, made: set[str], ended: set[str]) -> None:
        """Assert that a process that has polled knows these keys."""
        answers = {key_id: running.process.answer(self._keys[key_id]) for key_id in made | ended}
        assert answers == dict.fromkeys(made, "accepted") | dict.fromkeys(ended, "refused")

    async def _agree(self) -> None:
        """Mend all links, and wait until all processes and a new one give the same answers."""
        for running in self._running:
            running.process.link.is_up = True
            running.process.link.loses_answers = False
        ended = self._ended.union(*(running.pending for running in self._running))
        self._running.append(await self._start())
        answers: list[dict[str, str]] = []
        async with asyncio.timeout(PATIENCE_S):
            while not answers or any(
                each != answers[0] or any(each[key_id] != "refused" for key_id in ended)
                for each in answers
            ):
                for running in self._running:
                    await running.process.poll()
                    self._check(running)
                answers = [
                    {key_id: running.process.answer(key) for key_id, key in self._keys.items()}
                    for running in self._running
                ]
        left = self._made - self._attempted
        assert {answers[0][key_id] for key_id in left} <= {"accepted"}


_NAMES = ["add", "revoke", "revoke", "poll", "cut", "lose answers", "mend", "restart"]
_ACTIONS = st.builds(
    Action, st.sampled_from(_NAMES), st.integers(0, _PROCESSES - 1), st.integers(0, 3)
)


@given(st.lists(st.lists(_ACTIONS, min_size=1, max_size=4), max_size=12))
@example(
    [
        [Action("add", 0)],
        [Action("poll", 1)],
        [Action("cut", 0)],
        [Action("revoke", 0)],
        [Action("poll", 1)],
        [Action("mend", 0), Action("poll", 0)],
    ]
)
@example(
    [
        [Action("lose answers", 0), Action("add", 0), Action("add", 1)],
        [Action("revoke", 0, 1), Action("revoke", 1, 1), Action("poll", 2)],
        [Action("restart", 0), Action("poll", 1)],
    ]
)
def test_no_revoked_key_becomes_valid_again_and_all_processes_agree(
    new_place: NewPlace, rounds: list[list[Action]]
) -> None:
    """Actions of one round run at once, and rounds one after the other."""
    with new_place() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(issued, "POLL_INTERVAL_S", 0.001)
        asyncio.run(_World(place).play(rounds))
