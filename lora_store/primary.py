"""The Redis that accepts writes: errors that mean that it is unusable, and its current client.

All users of Redis in the project go through this module. An address may lead to another server
later, by a Service, a proxy or DNS, while connections to a demoted server remain open. A client is
therefore dropped as soon as its server is found not to be the primary, and the next use connects
anew. `lora_store.redis_role` asks servers for their role.

See decision 079 in docs/decisions.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from lora_store.connect import close, connect, errors, load
from lora_store.redis_role import ROLE_CHECK_S
from lora_store.redis_url import RedisUrl

NO_REPLICAS = "NOREPLICAS"
REPLICA = "it is a replica, not the primary"
_UNAVAILABLE = {
    "READONLY": REPLICA,
    "MASTERDOWN": "it is a replica that has lost its primary",
    "LOADING": "it is loading its data",
    "CLUSTERDOWN": "its cluster is down",
    NO_REPLICAS: "it has fewer replicas than min-replicas-to-write",
}
_REFUSED = {
    "OOM": "it has no memory left (maxmemory) and takes no writes",
    "MISCONF": "it cannot save its data to its disk and takes no writes",
}
# redis-py removes the code from the text of these errors.
_CODE_BY_CLASS = {
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "OutOfMemoryError": "OOM",
}
# redis-py adds a prefix to the error of a command in a pipeline, and a Redis before 7 to that of a
# command in a script.
_CODE = re.compile(
    r"(?:Command # \d+ \(.*\) of pipeline caused error: )?"
    r"(?:Error running script \(call to \w+\): @user_script: ?\d+: (?:@user_script: ?\d+: )?)?"
    r"-?([A-Z]+) ",
    re.DOTALL,
)


class RedisUnavailable(Exception):
    """No Redis that accepts writes answers. The message names no addresses or passwords."""


def code_of(error: BaseException) -> str:
    """Return the code of a server's error, also of one inside a script, "" for other errors."""
    code = _CODE_BY_CLASS.get(type(error).__name__)
    if code is not None:
        return code
    found = _CODE.match(str(error)) if isinstance(error, errors().ResponseError) else None
    return found[1] if found else ""


def describe(error: BaseException | None) -> str:
    """Return why a command failed, in words for operators.

    The text of redis-py is left out, because it may contain the sentinels' passwords.
    """
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return next((why for each in chain if (why := _why(each))), type(chain[0]).__name__)


def _why(error: BaseException) -> str | None:
    if isinstance(error, RedisUnavailable):
        return str(error)
    code = code_of(error)
    if (why := _UNAVAILABLE.get(code) or _REFUSED.get(code)) is not None:
        return why
    known = errors()
    words = {
        load().sentinel.MasterNotFoundError: "no sentinel answers and names a master that is up",
        known.AuthenticationError: "it refuses the user or password of its URL",
        known.TimeoutError: "no answer in time",
    }
    for kind, words_of_kind in words.items():
        if isinstance(error, kind):
            return words_of_kind
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else None


def is_unavailable(error: BaseException) -> bool:
    """Return True if the server cannot be used for writes, whatever the command was."""
    known = errors()
    kinds = (known.ConnectionError, known.TimeoutError, OSError, RedisUnavailable)
    of_cluster = (known.ClusterError, known.RedisClusterException)
    return code_of(error) in _UNAVAILABLE or isinstance(error, (*kinds, *of_cluster))


def refuses_writes(error: BaseException) -> bool:
    """Return True if the server can be read but refuses all writes."""
    return code_of(error) in _REFUSED


def failure_types() -> tuple[type[Exception], ...]:
    """Return the exceptions that a command inside `Primary.use` can raise."""
    return (errors().RedisError, RedisUnavailable)


@dataclass(eq=False)
class _SharedClient:
    """A client, and the number of threads that use it now."""

    client: Any
    connections: WeakSet[Any]
    users: int = 0
    is_dropped: bool = False
    is_checked_now: bool = False
    check_due: float = 0.0


class Primary:
    """The current client of one user of Redis, made on first use. For threads."""

    def __init__(
        self, url: RedisUrl, timeout_s: float, *, connect_timeout_s: float | None = None
    ) -> None:
        """Connect nowhere yet.

        Args:
            url: the server, the sentinels or the cluster.
            timeout_s: seconds that each command may take at one server.
            connect_timeout_s: seconds that each connect may take; None stands for `timeout_s`.
        """
        self.url = url
        self.generation = 0
        """Number of clients made; each one may use another server."""
        self._timeout_s = timeout_s
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._lock = threading.Condition()
        self._shared: _SharedClient | None = None

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Give the current client.

        Of the threads that meet one demotion, the first drops the client and the others find that
        it is gone. A server that only lacks replicas is the primary, so its client is retained.

        Raises:
            RedisUnavailable: the server is down, or is no primary that accepts writes.
            redis.RedisError: the server refuses this command.
        """
        held: _SharedClient | None = None
        try:
            held, is_due = self._take()
            if is_due:
                _check_idle(held)
                self._end_check(held)
            yield held.client
        except (errors().RedisError, errors().RedisClusterException, OSError) as error:
            if not is_unavailable(error):
                raise
            if held is not None and code_of(error) != NO_REPLICAS:
                self._drop(held)
            raise RedisUnavailable(describe(error)) from error
        finally:
            if held is not None:
                self._give_back(held)

    def close(self) -> None:
        """Close the current client, once no thread uses it; the next use makes another."""
        if (held := self._shared) is not None:
            self._drop(held)

    def _take(self) -> tuple[_SharedClient, bool]:
        """Return the client, and True if the caller must check its connections.

        Wait while another thread checks them: the pool is empty then, and each check would leave
        one more connection.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._shared is None or not self._shared.is_checked_now)
            held = self._shared
            if held is None:
                connections: WeakSet[Any] = WeakSet()
                client = connect(
                    self.url,
                    timeout_s=self._timeout_s,
                    connect_timeout_s=self._connect_timeout_s,
                    connections=connections,
                )
                held = self._shared = _SharedClient(client, connections)
                self.generation += 1
            now = time.monotonic()
            is_due = held.users == 0 and now >= held.check_due
            if is_due:
                held.check_due = now + ROLE_CHECK_S
                held.is_checked_now = True
            held.users += 1
            return held, is_due

    def _end_check(self, held: _SharedClient) -> None:
        with self._lock:
            held.is_checked_now = False
            self._lock.notify_all()

    def _drop(self, held: _SharedClient) -> None:
        with self._lock:
            if self._shared is held:
                self._shared = None
                self._lock.notify_all()
            held.is_dropped = True
            is_free = held.users == 0
        if is_free:
            close(held.client)

    def _give_back(self, held: _SharedClient) -> None:
        with self._lock:
            if held.is_checked_now:  # the check failed
                held.is_checked_now = False
                self._lock.notify_all()
            held.users -= 1
            is_free = held.is_dropped and held.users == 0
        if is_free:
            close(held.client)


def _check_idle(held: _SharedClient) -> None:
    """Check the role of the server of each idle connection.

    A pool reuses the connection that was used last. A connection made after the address had moved
    would otherwise hide for long that the others lead to the old server.
    """
    if not held.connections:
        return
    pool = held.client.connection_pool
    taken: list[Any] = []
    try:
        for _ in range(len(held.connections)):
            taken.append(pool.get_connection())  # noqa: PERF401 (what was taken is given back)
        for connection in taken:
            connection.check_health()
    finally:
        for connection in taken:
            pool.release(connection)


@contextlib.contextmanager
def write_verified(client: Any) -> Iterator[Any]:
    """Give a client with one connection, and ask its server for its role afterwards.

    A server that was demoted in between discards the writes that it accepted, without an error. A
    cluster is not asked: its replicas accept no writes, and its client finds the others.

    Raises:
        redis.ReadOnlyError: the server is a replica by now.
        redis.RedisError: the server cannot be asked.
    """
    if isinstance(client, load().RedisCluster):
        yield client
        return
    with client.client() as bound:
        yield bound
        bound.connection.check_role()
