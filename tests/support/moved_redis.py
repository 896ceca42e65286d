"""Two real Redis servers behind one address that moves between them, like a Service's.

Connections to the demoted server stay open: neither a Service nor most proxies close them.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from redis.exceptions import RedisError

from ops.local_stack.ports import LOCALHOST
from tests.support.redis_fleet import (
    COMMON,
    PASSWORD,
    Process,
    WatchedFleet,
    answers,
    redis_processes,
    running_sentinels,
    until,
)

_PASSWORD_LINE = next(line for line in COMMON if line.startswith("requirepass"))
_MASTER_LOGIN = _PASSWORD_LINE.replace("requirepass", "masterauth")
_INSTALL = {
    "redis 7": "apt-get install redis-server",
    "valkey 8": "apt-get install valkey-server (Debian 13, or bookworm-backports)",
}


@cache
def binaries() -> dict[str, Path]:
    """Return the available server binaries by product and major release."""
    found: dict[str, Path] = {}
    for path in (Process.binary, *(shutil.which(n, path="/usr/bin") for n in _NAMES)):
        if path is not None and Path(path).exists():
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
            match = re.match(r"(Redis|Valkey) server v=(\d+)", text.stdout)
            if match is not None:
                found[f"{match[1].lower()} {match[2]}"] = Path(path)
    return found


_NAMES = ("redis-server", "valkey-server")
KINDS = ("redis 6", "redis 7", "valkey 8")
"""The products and releases that the tests need."""


def why_missing(kind: str) -> str:
    return f"{kind} is not installed: {_INSTALL.get(kind, 'make setup')}"


class Forwarder:
    """A TCP port that forwards new connections to `target`. Existing connections are not moved."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server((LOCALHOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close the existing connections."""
        for each in list(self._open):
            _end(each)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((LOCALHOST, self.target))
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                self._open.add(one)
                # The server's move may have closed the connection already.
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            _end(each)
            self._open.discard(each)


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


@dataclass
class MovedRedis:
    """A Redis with one address. `url` is for gateways; `move` promotes the other server."""

    url: str
    servers: list[Process]
    forwarder: Forwarder

    def primary(self) -> Process:
        """Return the server to which clients connect."""
        return next(each for each in self.servers if each.port == self.forwarder.target)

    def move(self) -> Process:
        """Promote the other server, and return the former primary."""
        old = self.primary()
        new = next(server for server in self.servers if server is not old)
        new.client().execute_command("REPLICAOF", "NO", "ONE")
        self.forwarder.target = new.port
        old.client().execute_command("REPLICAOF", LOCALHOST, new.port)
        return old


@dataclass
class WatchedRedis:
    """A Redis with sentinels, with the interface of `MovedRedis`."""

    fleet: WatchedFleet

    @property
    def url(self) -> str:
        return self.fleet.url

    def move(self) -> Process:
        """Start a failover. Return the former primary once most sentinels name another server.

        The sentinels demote the former primary some 10 s later. It accepts writes until then.
        """
        old = self.fleet.master()
        assert old is not None
        self.fleet.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", "gate way")
        until(lambda: self.fleet.master() not in (None, old))
        return old


def clients_at(server: Process) -> list[dict[str, str]]:
    """Return the client connections, except those of the test, replicas and sentinels."""
    try:
        client = server.client()
        client.client_setname("own")
        found: list[dict[str, str]] = client.client_list()
    except RedisError:
        return []
    return [
        each
        for each in found
        if each["name"] != "own"
        and not set(each["flags"]) & set("SM")
        and not each["name"].startswith("sentinel-")
    ]


@contextlib.contextmanager
def one_address(binary: Path) -> Iterator[MovedRedis]:
    """Run a primary and its replica behind a forwarder."""
    with redis_processes(binary) as (_, make, _made):
        servers = [make(), make()]
        common = (*COMMON, _MASTER_LOGIN, "repl-diskless-sync-delay 0")
        servers[0].start(*common)
        servers[1].start(*common, f"replicaof {LOCALHOST} {servers[0].port}")
        for server in servers:
            until(lambda server=server: answers(server))
        until(lambda: servers[1].client().info("replication")["master_link_status"] == "up")
        forwarder = Forwarder(servers[0].port)
        try:
            url = f"redis://:{PASSWORD}@{LOCALHOST}:{forwarder.port}/0"
            yield MovedRedis(url, servers, forwarder)
        finally:
            forwarder.close()


@contextlib.contextmanager
def behind_sentinels(binary: Path) -> Iterator[WatchedRedis]:
    """Run a primary, two replicas and three sentinels."""
    with running_sentinels(binary=binary) as fleet:
        yield WatchedRedis(fleet)


FAILOVERS = {"one address": one_address, "sentinels": behind_sentinels}
