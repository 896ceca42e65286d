"""Adapter changes with an error injected at each disk or Redis step.

A change that returns is seen by every gateway. A change that raises is seen by none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from adapters.errors import ChangeUnknown, StoreError
from adapters.record import Record
from lora_store import names, tiered
from lora_store.disk import Disk
from lora_store.tiered import TieredStore
from tests.support.adapter_store import NEVER_S, StoreGateway, becomes, copies, gateway, record
from tests.support.full_disk import full_disk
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.slow

POLL_S = 0.02
SMALLER_THAN_ANY_RECORD = 64

Change = Callable[[StoreGateway], Awaitable[object]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A change to the adapter name `zh`, which `make` carries out.

    `versions` are the content numbers that `zh` has before the change. `after` is the content
    number that `zh` serves after it, or None if `zh` is then removed.
    """

    versions: tuple[int, ...]
    make: Change
    after: int | None

    @property
    def before(self) -> int | None:
        return self.versions[-1] if self.versions else None


CASES = {
    "add a name": Case((), lambda gateway: gateway.add("zh", 3), 3),
    "add a version": Case((1,), lambda gateway: gateway.add("zh", 3), 3),
    "roll back": Case((1, 2), lambda gateway: gateway.registry.rollback("zh"), 1),
    "remove": Case((1, 2), lambda gateway: gateway.registry.remove("zh"), None),
}


class Steps:
    """A counter of I/O steps that makes some of them fail.

    Steps count only inside `failing`. Step number `first` fails; if `lasting`, all later steps fail
    too.
    """

    def __init__(self) -> None:
        self._armed = False
        self._first = 0
        self._lasting = False
        self._seen = 0

    @property
    def reached(self) -> bool:
        """Return True if any step failed."""
        return self._seen > self._first

    @contextlib.contextmanager
    def failing(self, first: int, *, lasting: bool) -> Iterator[None]:
        self._first, self._lasting, self._seen, self._armed = first, lasting, 0, True
        try:
            yield
        finally:
            self._armed = False

    def fails(self) -> bool:
        """Count one step, and return True if this step has to fail."""
        if not self._armed:
            return False
        number = self._seen
        self._seen += 1
        return number >= self._first if self._lasting else number == self._first


class DiskSteps(Steps):
    """Fault injection for file system calls on paths below `folder` that end with `ending`.

    Each open (also for reading), rename, removal, mkdir, utime and scandir is one step.
    """

    _ERROR = errno.ENOSPC
    _EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.utime", "os.scandir"})

    def __init__(self, folder: Path, ending: str = "") -> None:
        super().__init__()
        self._folder = str(folder)
        self._ending = ending
        # Python cannot remove an audit hook, so the hook stays until the process ends. It ignores
        # every call while it is not armed. An exception that the hook raises makes the audited call
        # fail.
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._armed and event in self._EVENTS:
            path = str(arguments[0])
            ours = path.startswith(self._folder) and path.endswith(self._ending)
            if ours and self._fails(event, arguments):
                raise OSError(self._ERROR, os.strerror(self._ERROR))

    def _fails(self, event: str, arguments: tuple[Any, ...]) -> bool:
        return self.fails()


class ReadOnlyDisk(DiskSteps):
    """A disk that was remounted read-only: each step that would write fails, each read succeeds."""

    _ERROR = errno.EROFS

    def _fails(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            _, _, flags = arguments
            return bool(flags & (os.O_WRONLY | os.O_RDWR)) and self.fails()
        return event != "os.scandir" and self.fails()


class RedisSteps(Steps):
    """Connection losses in the Redis commands of one store.

    Each command is a step. If `done`, the connection breaks after Redis has executed the command,
    otherwise before. A non-empty `only` names the one command that can fail.
    """

    def __init__(self, store: TieredStore, *, done: bool, only: str = "") -> None:
        super().__init__()
        tier = store._redis
        assert tier is not None
        use = tier._use

        @contextlib.contextmanager
        def failing() -> Iterator[Any]:
            with use() as client:
                self._wrap(client, done=done, only=only)
                yield client

        tier._use = failing  # type: ignore[method-assign]

    def _wrap(self, client: Any, *, done: bool, only: str) -> None:
        """Make commands of `client` and of its single-connection clients fail."""
        if "execute_command" in vars(client):
            return
        execute, make = client.execute_command, client.client

        def bound() -> Any:
            made = make()
            self._wrap(made, done=done, only=only)
            return made

        def command(*arguments: Any, **options: Any) -> Any:
            fails = only in ("", arguments[0]) and self.fails()
            if fails and not done:
                raise redis.ConnectionError("lost before")
            result = execute(*arguments, **options)
            if fails:
                raise redis.ConnectionError("lost after")
            return result

        client.execute_command, client.client = command, bound


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the retry interval of the store, so that failed copies are retried soon."""
    monkeypatch.setattr(tiered, "_RETRY_S", 0.05)


def _served(number: int | None) -> str | None:
    return None if number is None else content(number).digest


async def _check(
    root: Path,
    server: RedisServer | None,
    faults: Callable[[StoreGateway], Steps],
    case: Case,
    *,
    first: int,
    lasting: bool,
) -> bool:
    """Make one change whose step number `first` fails, and check what every gateway serves then.

    Return True if the change had that many steps, which means that a step did fail.
    """
    async with (
        gateway(root / "a", server, poll_s=POLL_S) as one,
        gateway(root / "b", server, poll_s=POLL_S) as other,
    ):
        for number in case.versions:
            await one.add("zh", number)
        if server is not None:
            await becomes(lambda: other.serves("zh") == _served(case.before))
        steps = faults(one)
        with steps.failing(first, lasting=lasting):
            try:
                await case.make(one)
                expected = _served(case.after)
            except ChangeUnknown:
                # ChangeUnknown needs two faults: the outcome of a single fault is always known
                raise
            except StoreError:
                expected = _served(case.before)
            assert one.serves("zh") == expected
        if server is not None:
            # Check that each gateway has seen all earlier changes of the other one. Changes are
            # seen in order, so a gateway that serves the later name has seen them.
            await other.add("from-other", 4)
            await becomes(lambda: one.serves("from-other"))
            await becomes(lambda: not one.store.stats.unwritten)
            await one.add("from-one", 4)
            await becomes(lambda: other.serves("from-one"))
            assert other.serves("zh") == expected
            if expected is not None:
                await becomes(lambda: expected in copies(root / "b"))
        assert one.serves("zh") == expected
        await becomes(lambda: not one.store.stats.unwritten)
    folders = ("a",) if server is None else ("a", "b")
    for folder in folders:
        async with gateway(root / folder, None) as alone:
            assert alone.serves("zh") == expected
            assert expected is None or await alone.store.get(expected)
    if server is not None:
        async with gateway(root / "c", server) as new:
            assert new.serves("zh") == expected
    return steps.reached


async def _check_all(
    root: Path,
    server: RedisServer | None,
    faults: Callable[[Path], Callable[[StoreGateway], Steps]],
    name: str,
) -> None:
    for lasting in (False, True):
        first = 0
        reached = True
        while reached:
            folder = root / f"{first}-{lasting}"
            reached = await _check(
                folder, server, faults(folder), CASES[name], first=first, lasting=lasting
            )
            if server is not None:
                with server.client() as client:
                    client.flushall()
            first += 1
        assert first > 2, "hardly a step of the change was reached"


@pytest.mark.parametrize("with_redis", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_each_step_at_the_disk(
    tmp_path: Path, redis_server: RedisServer, with_redis: bool, name: str
) -> None:
    server = redis_server if with_redis else None
    await _check_all(tmp_path, server, lambda root: lambda _: DiskSteps(root / "a"), name)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_each_step_at_redis(
    tmp_path: Path, redis_server: RedisServer, done: bool, name: str
) -> None:
    await _check_all(
        tmp_path,
        redis_server,
        lambda _: lambda gateway: RedisSteps(gateway.store, done=done),
        name,
    )


async def test_on_a_full_disk_others_changes_are_seen_and_own_ones_made(
    tmp_path: Path, redis_server: RedisServer, at_redis: redis.Redis
) -> None:
    async with (
        gateway(tmp_path / "a", redis_server, poll_s=POLL_S) as one,
        gateway(tmp_path / "b", redis_server, poll_s=POLL_S) as other,
    ):
        await one.add("zh", 1)
        await one.add("ja", 2)
        await becomes(lambda: other.serves("ja"))
        with full_disk(SMALLER_THAN_ANY_RECORD):
            await one.registry.remove("zh")
            assert one.serves("zh") is None
            await becomes(lambda: other.serves("zh") is None)
            await becomes(lambda: other.store.stats.unwritten == 1)
            with pytest.raises(StoreError, match="File too large"):
                await one.add("ko", 3)
            assert one.serves("ko") is None
            # Now only the memory of the gateways has the removal: the disk is full and Redis is
            # empty.
            at_redis.flushall()
            await becomes(lambda: at_redis.hexists("lora:names", "zh"))
        await becomes(lambda: not one.store.stats.unwritten and not other.store.stats.unwritten)
        assert other.serves("ko") is None
    for folder in ("a", "b"):
        async with gateway(tmp_path / folder, None) as alone:
            assert alone.serves("zh") is None
            assert alone.serves("ja") == content(2).digest


async def test_on_a_read_only_disk_others_changes_are_seen_and_own_ones_made(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        gateway(tmp_path / "a", redis_server, poll_s=POLL_S) as one,
        gateway(tmp_path / "b", redis_server, poll_s=POLL_S) as other,
    ):
        await one.add("zh", 1)
        await one.add("ja", 2)
        await becomes(lambda: other.serves("ja"))
        with ReadOnlyDisk(tmp_path / "b").failing(0, lasting=True):
            await one.add("zh", 3)
            await becomes(lambda: other.serves("zh") == content(3).digest)
            assert await other.holds(3)
            await other.registry.remove("ja")
            await becomes(lambda: one.serves("ja") is None)
            # Additionally damage the record of `zh` on the gateway's own read-only disk, where the
            # gateway cannot move the damaged file to the quarantine.
            os.link(tmp_path / "b" / "names" / "zh.json", tmp_path / "same")
            (tmp_path / "same").write_bytes(b"{")
            await one.registry.rollback("zh")
            await becomes(lambda: other.serves("zh") == content(1).digest)
            with pytest.raises(StoreError, match="Read-only file system"):
                await other.add("ko", 4)
        await becomes(lambda: not other.store.stats.unwritten)
    async with gateway(tmp_path / "b", None) as alone:
        assert alone.serves("zh") == content(1).digest
        assert alone.serves("ja") is None


async def test_the_disk_is_tried_again_though_nothing_changes(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway(tmp_path, redis_server, poll_s=POLL_S) as one:
        await one.add("zh", 1)
        with DiskSteps(tmp_path, ".tmp").failing(0, lasting=True):
            await one.registry.remove("zh")
            # Make the folder look old. The store reads a folder that changed within the last second
            # again anyway.
            os.utime(tmp_path / "names", (1, 1))
            looks = one.store.stats.syncs
            await becomes(lambda: one.store.stats.syncs > looks + 3)
            assert one.store.stats.unwritten == 1
        await becomes(lambda: not one.store.stats.unwritten)
    assert Disk(tmp_path).records()["zh"].is_removed


def test_a_change_follows_what_redis_took_and_the_disk_did_not(tmp_path: Path) -> None:
    """A change is based on the last revision that Redis stored, even if the disk lacks it.

    Redis is unavailable by the time of the change.
    """
    disk = Disk(tmp_path)
    disk.put_record(record())
    removed = dataclasses.replace(record(), revision=2, served="", versions=())

    def add_again(current: Record | None) -> Record:
        assert current == removed
        return dataclasses.replace(record(), life=2, revision=3)

    changed = names.change(disk, None, "zh", add_again, removed)
    assert disk.record("zh") == changed.record


async def test_a_full_disk_alone_changes_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, None, poll_s=POLL_S) as one:
        await one.add("zh", 1)
        with full_disk(SMALLER_THAN_ANY_RECORD):
            with pytest.raises(StoreError, match="File too large"):
                await one.registry.remove("zh")
            assert one.serves("zh") == content(1).digest
    assert Disk(tmp_path).records()["zh"].served == content(1).digest


@pytest.mark.parametrize("done", [False, True])
async def test_the_answer_says_so_when_nobody_knows(
    tmp_path: Path, redis_server: RedisServer, done: bool
) -> None:
    async with gateway(tmp_path, redis_server, poll_s=NEVER_S) as one:
        await one.add("zh", 1)
        steps = RedisSteps(one.store, done=done, only="EVAL")
        with (
            full_disk(SMALLER_THAN_ANY_RECORD),
            steps.failing(0, lasting=False),
            pytest.raises(ChangeUnknown, match="zh was changed is not known"),
        ):
            await one.registry.remove("zh")
        assert steps.reached
        assert one.serves("zh") == content(1).digest
        assert not one.store.stats.redis_up


@pytest.mark.parametrize("command", ["HINCRBY", "PUBLISH"])
async def test_what_redis_refuses_it_has_not_taken(
    tmp_path: Path, redis_server: RedisServer, at_redis: redis.Redis, command: str
) -> None:
    async with gateway(tmp_path, redis_server, poll_s=NEVER_S) as one:
        await one.add("zh", 1)
        at_redis.acl_setuser("default", enabled=True, nopass=True, commands=[f"-{command}"])
        with (
            full_disk(SMALLER_THAN_ANY_RECORD),
            pytest.raises(StoreError, match="adapter folder fails: File too large"),
        ):
            await one.registry.remove("zh")
        assert one.serves("zh") == content(1).digest
    async with gateway(tmp_path / "new", redis_server) as new:
        assert new.serves("zh") == content(1).digest
