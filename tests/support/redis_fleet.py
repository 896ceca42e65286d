"""Groups of real Redis processes: a master with sentinels, and a cluster."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.exceptions import RedisError

from ops.local_stack.errors import StackError
from ops.local_stack.ports import LOCALHOST, PortClaims

PASSWORD = "p%40ss:w,rd"
"""Password in URL encoding. It has a colon, a comma and an escape on purpose."""
_PASSWORD = "p@ss:w,rd"
_BINARY = Path(sys.executable).parent / "redis-server"
_SLOTS = 16384


@dataclass
class Process:
    """A redis-server or sentinel process with its configuration file."""

    folder: Path
    port: int
    sentinel: bool = False
    binary: Path = _BINARY
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        password = None if self.sentinel else _PASSWORD
        self._client = redis.Redis(LOCALHOST, self.port, password=password, socket_timeout=30)

    def start(self, *lines: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "redis.conf"
        if lines:
            path.write_text("\n".join((f"port {self.port}", *lines, "")), encoding="utf-8")
        command = [str(self.binary), str(path)] + ["--sentinel"] * self.sentinel
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def client(self) -> redis.Redis:
        """Return the test's own client, which is closed with the process."""
        return self._client

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


@dataclass
class Fleet:
    """A group of processes. `url` is the value of the gateway's setting."""

    url: str
    servers: list[Process]

    def at(self, port: int) -> Process:
        return next(server for server in self.servers if server.port == port)


@dataclass
class WatchedFleet(Fleet):
    sentinels: list[Process]

    def master(self) -> Process | None:
        """Return the server that most sentinels name and that accepts writes, or None."""
        named = []
        for sentinel in self.sentinels:
            with contextlib.suppress(RedisError):
                question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "gate way")
                address = sentinel.client().execute_command(*question)
                named += [] if address is None else [int(address[1])]
        for server in self.servers:
            if named.count(server.port) >= 2 and is_master(server):
                return server
        return None


def is_master(server: Process) -> bool:
    try:
        return bool(server.client().info("replication")["role"] == "master")
    except RedisError:
        return False


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


@contextlib.contextmanager
def redis_processes(
    binary: Path = _BINARY,
) -> Iterator[tuple[Path, Callable[..., Process], list[Process]]]:
    """Yield a folder, a factory of processes, and the list of processes. Kill all at the end."""
    folder = Path(tempfile.mkdtemp(prefix="redis-"))
    made: list[Process] = []

    def make(*, sentinel: bool = False) -> Process:
        made.append(Process(folder / str(len(made)), _port(claims), sentinel, binary))
        return made[-1]

    with PortClaims() as claims:
        try:
            yield folder, make, made
        finally:
            for process in made:
                process.kill()
            shutil.rmtree(folder)


def _port(claims: PortClaims) -> int:
    """Return a free port whose cluster bus port, 10,000 higher, is free and claimed too."""
    while True:
        port = claims.take_free()
        with contextlib.suppress(OverflowError, StackError):
            claims.take(port + 10_000)
            return port


COMMON = (f"bind {LOCALHOST}", 'save ""', f'requirepass "{_PASSWORD}"')


@contextlib.contextmanager
def running_sentinels(*, stubborn: bool = False, binary: Path = _BINARY) -> Iterator[WatchedFleet]:
    """Run a master with two replicas and three sentinels, which notice the master's death in 1 s.

    A `stubborn` master cannot be demoted, like one that is cut off from the sentinels.
    """
    with redis_processes(binary) as (_, make, _made):
        servers = [make() for _ in range(3)]
        common = (*COMMON, f'masterauth "{_PASSWORD}"', "repl-diskless-sync-delay 0")
        servers[0].start(*common, *['rename-command SLAVEOF ""'] * stubborn)
        for replica in servers[1:]:
            replica.start(*common, f"replicaof {LOCALHOST} {servers[0].port}")
        until(lambda: answers(servers[0]))
        until(lambda: servers[0].client().info("replication")["connected_slaves"] == 2)
        sentinels = [make(sentinel=True) for _ in range(3)]
        for sentinel in sentinels:
            sentinel.start(
                f"bind {LOCALHOST}",
                f'sentinel monitor "gate way" {LOCALHOST} {servers[0].port} 2',
                'sentinel down-after-milliseconds "gate way" 1000',
                'sentinel failover-timeout "gate way" 3000',
                f'sentinel auth-pass "gate way" "{_PASSWORD}"',
            )
        hosts = ",".join(f"{LOCALHOST}:{sentinel.port}" for sentinel in sentinels)
        fleet = WatchedFleet(
            f"redis+sentinel://:{PASSWORD}@{hosts}/gate%20way/0", servers, sentinels
        )
        until(lambda: all(_sees_all(sentinel) for sentinel in sentinels))
        yield fleet


def answers(server: Process) -> bool:
    try:
        return bool(server.client().ping())
    except RedisError:
        return False


def _sees_all(sentinel: Process) -> bool:
    try:
        state = sentinel.client().sentinel_masters().get("gate way", {})
    except RedisError:
        return False
    return state.get("num-other-sentinels") == 2 and state.get("num-slaves") == 2


@contextlib.contextmanager
def running_cluster(*, replicas: bool = False) -> Iterator[Fleet]:
    """Run a cluster of three masters, each with a replica if `replicas` is set."""
    with redis_processes() as (_, make, _made):
        servers = [make() for _ in range(6 if replicas else 3)]
        for server in servers:
            server.start(
                *COMMON,
                f'masterauth "{_PASSWORD}"',
                "repl-diskless-sync-delay 0",
                "cluster-enabled yes",
                "cluster-node-timeout 1000",
            )
        for server in servers:
            until(lambda server=server: answers(server))
        share = -(-_SLOTS // 3)
        for number, server in enumerate(servers[:3]):
            client = server.client()
            client.execute_command(f"CLUSTER SET-CONFIG-EPOCH {number + 1}")
            slots = range(number * share, min(_SLOTS, (number + 1) * share))
            client.execute_command("CLUSTER ADDSLOTS", *slots)
        for server in servers[1:]:
            server.client().execute_command("CLUSTER MEET", LOCALHOST, servers[0].port)
        until(lambda: all(_knows(server, len(servers)) for server in servers))
        for master, replica in zip(servers[:3], servers[3:], strict=False):
            identity = master.client().execute_command("CLUSTER MYID").decode()
            replica.client().execute_command("CLUSTER REPLICATE", identity)
        until(lambda: all(_is_complete(server) for server in servers))
        if replicas:
            until(lambda: all(_has_replica(server) for server in servers[:3]))
        hosts = ",".join(f"{LOCALHOST}:{server.port}" for server in servers[:2])
        yield Fleet(f"redis+cluster://:{PASSWORD}@{hosts}", servers)


def _info(server: Process) -> dict[str, str]:
    info: dict[str, str] = server.client().execute_command("CLUSTER INFO")
    return info


def _knows(server: Process, count: int) -> bool:
    return int(_info(server)["cluster_known_nodes"]) == count


def _is_complete(server: Process) -> bool:
    return _info(server)["cluster_state"] == "ok"


def _has_replica(server: Process) -> bool:
    state = server.client().info("replication")
    return state["connected_slaves"] == 1 and state["slave0"]["state"] == "online"
