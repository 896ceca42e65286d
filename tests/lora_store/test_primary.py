"""Redis errors that mean "unavailable", and the client that `Primary` drops after such an error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from lora_store import redis_role, redis_url
from lora_store.primary import (
    Primary,
    RedisUnavailable,
    code_of,
    describe,
    is_unavailable,
    write_verified,
)
from lora_store.redis_role import agreeing_sentinels, role_of
from tests.support.limit_requests import PATIENT_S
from tests.support.moved_redis import (
    KINDS,
    MovedRedis,
    binaries,
    clients_at,
    one_address,
    why_missing,
)
from tests.support.redis_fleet import until
from tests.support.redis_server import RedisServer

THREADS = 100


@pytest.fixture(params=KINDS)
def moved(request: pytest.FixtureRequest) -> Iterator[MovedRedis]:
    if request.param not in binaries():
        pytest.skip(why_missing(request.param))
    with one_address(binaries()[request.param]) as found:
        yield found


@pytest.fixture
def primary(moved: MovedRedis) -> Iterator[Primary]:
    primary = Primary(redis_url.parse(moved.url), PATIENT_S)
    yield primary
    primary.close()


def port_of(client: Any) -> int:
    return int(client.info("server")["tcp_port"])


def is_refused(primary: Primary) -> bool:
    try:
        with primary.use() as client:
            client.get("a")
    except RedisUnavailable as error:
        return str(error) == "it is a replica, not the primary"
    return False


def test_who_only_reads_notices_a_demotion(moved: MovedRedis, primary: Primary) -> None:
    with primary.use() as client:
        assert client.get("a") is None
        before = port_of(client)
    old = moved.move()
    assert old.port == before
    until(lambda: is_refused(primary))
    with primary.use() as client:
        assert port_of(client) == moved.primary().port


def test_a_connection_that_is_not_used_is_asked_too(moved: MovedRedis, primary: Primary) -> None:
    """An idle pooled connection to the old primary is checked too.

    The pool hands out the connection used last, which leads to the new primary in this test.
    """
    with primary.use() as client:
        to_old = client.client()
        assert to_old.get("a") is None
        old = moved.move()
        first, last = client.client(), client.client()
        assert port_of(first) == port_of(last) == moved.primary().port
        # Put the old connection in the middle of the pool. A check that takes and returns every
        # connection reverses their order, so the first and the last would change with each check.
        for each in (first, to_old, last):
            each.close()
    until(lambda: is_refused(primary))
    until(lambda: not clients_at(old))


def test_a_write_is_refused_and_the_next_one_taken(moved: MovedRedis, primary: Primary) -> None:
    """A write inside a script is refused, too, where Redis releases word the error differently."""
    script = "return redis.call('SET', KEYS[1], ARGV[1])"
    with primary.use() as client:
        client.eval(script, 1, "a", "1")
    moved.move()
    with pytest.raises(RedisUnavailable, match="replica"), primary.use() as client:
        client.eval(script, 1, "a", "2")
    with primary.use() as client:
        client.eval(script, 1, "a", "3")
    assert moved.primary().client().get("a") == b"3"


def test_a_write_to_a_server_that_is_demoted_behind_it_is_not_acknowledged(
    moved: MovedRedis, primary: Primary
) -> None:

    def write() -> None:
        with primary.use() as client, write_verified(client) as bound:
            assert bound.set("a", "1")
            moved.move()

    with pytest.raises(RedisUnavailable, match="replica"):
        write()
    assert primary.generation == 1
    with primary.use() as client, write_verified(client) as bound:
        assert bound.set("a", "2")
    assert moved.primary().client().get("a") == b"2"


def test_all_who_meet_one_demotion_connect_anew_once(moved: MovedRedis, primary: Primary) -> None:
    together = threading.Barrier(THREADS)
    done = threading.Barrier(THREADS)

    def write(number: int) -> str:
        with primary.use() as client:
            client.get("a")
            if together.wait() == 0:
                moved.move()
            done.wait()
            client.set("a", number)
        return ""

    with ThreadPoolExecutor(THREADS) as threads:
        tasks = [threads.submit(write, number) for number in range(THREADS)]
        ends = [str(task.exception()) for task in tasks]
    # A connection opened after the demotion reaches the new primary, even through the old client.
    assert "it is a replica, not the primary" in ends
    assert set(ends) <= {"None", "it is a replica, not the primary"}
    assert primary.generation == 1
    with ThreadPoolExecutor(THREADS) as threads:
        assert not any(threads.map(lambda _: is_refused(primary), range(THREADS)))
    assert primary.generation == 2


def test_role_checks_make_no_connections(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent users open no additional connections while a role check holds one."""
    monkeypatch.setattr("lora_store.primary.ROLE_CHECK_S", 0.0)
    check = redis.Connection.check_health

    def check_slowly(connection: redis.Connection) -> None:
        time.sleep(0.001)  # long enough for other threads to need a connection during the check
        check(connection)

    monkeypatch.setattr("redis.Connection.check_health", check_slowly)
    made: set[int] = set()
    threads = 4
    with contextlib.closing(Primary(redis_url.parse(redis_server.url), PATIENT_S)) as primary:

        def use(_: int) -> None:
            with primary.use() as client:
                made.add(client.client_id())

        with ThreadPoolExecutor(threads) as pool:
            for _ in range(50):  # between two rounds the client is idle
                list(pool.map(use, range(threads)))
    assert len(made) <= threads


def test_a_late_error_of_an_old_client_leaves_the_new_one(
    moved: MovedRedis, primary: Primary
) -> None:
    with primary.use() as old:
        first, second = old.client(), old.client()
        for each in (first, second):
            assert each.get("a") is None
        demoted = moved.move()

    def fail(pinned: Any) -> None:
        with primary.use() as client:
            assert client is old
            with pytest.raises(RedisUnavailable), primary.use():
                first.set("a", "1")
            with primary.use() as new:
                new.set("a", "2")
            pinned.set("a", "3")

    with pytest.raises(RedisUnavailable):
        fail(second)
    assert primary.generation == 2
    for each in (first, second):
        each.close()
    with primary.use() as client:
        assert client is not old
        assert client.get("a") == b"2"
    assert primary.generation == 2
    until(lambda: not clients_at(demoted))


def test_a_primary_without_replicas_keeps_its_client(redis_server: RedisServer) -> None:
    primary = Primary(redis_url.parse(redis_server.url), PATIENT_S)
    with redis_server.client() as own:
        own.config_set("min-replicas-to-write", 1)
        for command in (("SET", "a", "1"), ("EVAL", "return redis.call('SET', 'a', '1')", 0)):
            with pytest.raises(RedisUnavailable, match="min-replicas"), primary.use() as client:
                client.execute_command(*command)
        own.config_set("min-replicas-to-write", 0)
        with primary.use() as client:
            client.set("a", "1")
    assert primary.generation == 1
    primary.close()


def test_who_may_not_ask_for_the_role_goes_by_what_is_refused(
    moved: MovedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    for server in moved.servers:
        server.client().execute_command(
            "ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", "-hello", "-role"
        )
    port = moved.url.rpartition("@")[2]
    primary = Primary(redis_url.parse(f"redis://plain:secret@{port}?protocol=2"), PATIENT_S)
    with primary.use() as client:
        client.set("a", "1")
    moved.move()
    with pytest.raises(RedisUnavailable), primary.use() as client:
        client.set("a", "2")
    with primary.use() as client:
        client.set("a", "3")
    primary.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("READONLY You can't write against a read only replica.", "READONLY"),
        (
            "ERR Error running script (call to f_0ab): @user_script:7: @user_script: 7: "
            "-READONLY You can't write against a read only replica.",
            "READONLY",
        ),
        ("READONLY You can't write. script: 0ab, on @user_script:7.", "READONLY"),
        ("LOADING Redis is loading the dataset in memory", "LOADING"),
        ("MASTERDOWN Link with MASTER is down", "MASTERDOWN"),
        ("NOREPLICAS Not enough good replicas to write.", "NOREPLICAS"),
        ("CLUSTERDOWN The cluster is down", "CLUSTERDOWN"),
        (
            "Command # 2 (XADD key t caused error: \\n) of pipeline caused error: "
            "NOREPLICAS Not enough good replicas to write.",
            "NOREPLICAS",
        ),
    ],
)
def test_errors_that_mean_unavailable(text: str, code: str) -> None:
    error = redis._parsers.base.BaseParser.parse_error(text)
    assert code_of(error) == code
    assert is_unavailable(error)


@pytest.mark.parametrize(
    "text",
    [
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "ERR Error running script (call to f_0ab): @user_script:7: @user_script: 7: -WRONGTYPE no",
        "ERR unknown command 'READONLY '",
        "ERR value is not READONLY ",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "NOPERM this user has no permissions",
    ],
)
def test_errors_of_one_command_alone(text: str) -> None:
    assert not is_unavailable(redis._parsers.base.BaseParser.parse_error(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "no memory left"),
        ("ERR Error running script (call to f_0ab): @user_script:7: -OOM no", "no memory left"),
        ("MISCONF Redis is configured to save RDB snapshots, but it cannot", "cannot save"),
    ],
)
def test_refused_writes_in_words(text: str, why: str) -> None:
    assert why in describe(redis._parsers.base.BaseParser.parse_error(text))


@pytest.mark.parametrize(
    ("answer", "role"),
    [
        ([b"server", b"redis", b"proto", 2, b"role", b"replica", b"modules", []], "replica"),
        ({b"server": b"valkey", b"role": b"master"}, "primary"),
        ([b"slave", b"10.0.0.1", 6379, b"connected", 7], "replica"),
        ([b"master", 7, []], "primary"),
        ({b"role": b"active-replica"}, "primary"),
        ([b"sentinel", [b"main"]], None),
        (b"OK", None),
        ([], None),
        (redis.ResponseError("no"), None),
    ],
)
def test_roles(answer: object, role: str | None) -> None:
    assert role_of(answer) == role


class _Sentinel:
    """A fake sentinel: epoch, host and down flag of its master, or None if it is silent."""

    def __init__(self, said: tuple[int, str, bool] | None) -> None:
        self.said, self.asked = said, 0

    def sentinel_masters(self) -> dict[str, Any]:
        self.asked += 1
        if self.said is None:
            raise redis.ConnectionError("silent")
        epoch, host, is_down = self.said
        state = {"ip": host, "port": 1, "config-epoch": epoch, "num-other-sentinels": 2}
        return {"s": state | {"is_master": True, "is_sdown": is_down, "is_odown": False}}


def _chosen(*said: tuple[int, str, bool] | None) -> str:
    sentinels = agreeing_sentinels()([])
    sentinels.sentinels = [_Sentinel(each) for each in said]
    found: str = sentinels.discover_master("s")[0]
    return found


OLD, NEW = (1, "old", False), (2, "new", False)


def test_the_newest_configuration_of_sentinels_counts_in_any_order() -> None:
    assert _chosen(OLD, NEW, NEW) == _chosen(NEW, OLD, NEW) == "new"
    assert _chosen(OLD, OLD, OLD) == _chosen(None, OLD, OLD) == _chosen(None, None, OLD) == "old"
    assert _chosen(None, OLD, NEW) == _chosen(NEW, OLD, None) == "new"
    # A sentinel that alone cannot reach the master is outvoted, but never by an older
    # configuration.
    assert _chosen((2, "new", True), NEW, NEW) == "new"
    with pytest.raises(redis.sentinel.MasterNotFoundError):
        _chosen(OLD, (2, "new", True), None)
    for nobody in [(None, None, None), ()]:
        with pytest.raises(redis.sentinel.MasterNotFoundError):
            _chosen(*nobody)


def test_nobody_waits_again_for_silent_sentinels_while_another_one_answers() -> None:
    silent = [_Sentinel(None), _Sentinel(None)]
    old, new = _Sentinel(OLD), _Sentinel(NEW)
    sentinels = agreeing_sentinels()([])
    sentinels.sentinels = [*silent, old]
    for _ in range(5):
        assert sentinels.discover_master("s")[0] == "old"
    assert [each.asked for each in silent] == [1, 1]
    sentinels.sentinels.append(new)
    assert sentinels.discover_master("s")[0] == "new", "the newest of those that answer"
    # Silent sentinels are asked again if no other sentinel knows a master that is up.
    old.said = new.said = (2, "new", True)
    silent[0].said = (3, "newest", False)
    assert sentinels.discover_master("s")[0] == "newest"
    assert [each.asked for each in silent] == [2, 1]


def test_a_sentinel_that_was_silent_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_role, "_SILENT_S", 0.0)
    sentinels = agreeing_sentinels()([])
    sentinels.sentinels = [silent, _] = [_Sentinel(None), _Sentinel(OLD)]
    assert sentinels.discover_master("s")[0] == "old"
    silent.said = NEW
    assert sentinels.discover_master("s")[0] == "new"
