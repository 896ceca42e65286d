"""Client of the primary, the Redis server that accepts writes, and classification of Redis errors.

All code of the project that uses Redis goes through this module. After a failover, an address (of a
Service, a proxy or in DNS) may lead to another server, while connections to the demoted server
remain open. A client is therefore dropped as soon as its server is found not to be the primary. The
next use connects again. `lora_store.redis_role` asks servers for their role.

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
# Error codes by redis-py's exception class: redis-py removes the code from the text of these
# errors.
_CODE_BY_CLASS = {
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "OutOfMemoryError": "OOM",
}
# Error code at the beginning of a message, after optional prefixes. redis-py adds a prefix to the
# errors of commands in a pipeline, and Redis before 7 to those of commands in a script.
_CODE = re.compile(
    r"(?:Command # \d+ \(.*\) of pipeline caused error: )?"
    r"(?:Error running script \(call to \w+\): @user_script: ?\d+: (?:@user_script: ?\d+: )?)?"
    r"-?([A-Z]+) ",
    re.DOTALL,
)


class RedisUnavailable(Exception):
    """Error if no Redis server that accepts writes can be used. The message has no addresses or
    passwords.
    """


def code_of(error: BaseException) -> str:
    """Return the code of an error that the server sent, such as "OOM", also if it occurred in a
    script.

    Return "" for other errors.
    """
    code = _CODE_BY_CLASS.get(type(error).__name__)
    if code is not None:
        return code
    found = _CODE.match(str(error)) if isinstance(error, errors().ResponseError) else None
    return found[1] if found else ""


def describe(error: BaseException | None) -> str:
    """Return the reason why a command failed, for operators.

    The text of redis-py's error is not used, because it may contain the sentinels' passwords.
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
    """Return True if the error means that the server cannot be used for any write now."""
    known = errors()
    kinds = (known.ConnectionError, known.TimeoutError, OSError, RedisUnavailable)
    of_cluster = (known.ClusterError, known.RedisClusterException)
    return code_of(error) in _UNAVAILABLE or isinstance(error, (*kinds, *of_cluster))


def refuses_writes(error: BaseException) -> bool:
    """Return True if the error means that the server answers reads but refuses all writes."""
    return code_of(error) in _REFUSED


def failure_types() -> tuple[type[Exception], ...]:
    """Return the exception classes that a command within `Primary.use` can raise."""
    return (errors().RedisError, RedisUnavailable)


@dataclass(eq=False)
class _SharedClient:
    """A redis-py client that threads share. `users` is the number of threads that use it now.

    `connections` has the client's connections, as far as they are known. `check_due` is the
    monotonic time from which the roles of idle connections must be checked again.
    """

    client: Any
    connections: WeakSet[Any]
    users: int = 0
    is_dropped: bool = False
    is_checked_now: bool = False
    check_due: float = 0.0


class Primary:
    """Holder of the current client, which is created on first use. Thread-safe."""

    def __init__(
        self, url: RedisUrl, timeout_s: float, *, connect_timeout_s: float | None = None
    ) -> None:
        """Create the holder without connecting.

        Args:
            url: the server, the sentinels or the cluster.
            timeout_s: seconds that each command may take at one server.
            connect_timeout_s: seconds that each connect may take; None stands for `timeout_s`.
        """
        self.url = url
        self.generation = 0
        """Number of clients created so far. Each client may use another server than the one before.
        """
        self._timeout_s = timeout_s
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._lock = threading.Condition()
        self._shared: _SharedClient | None = None

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Return a context manager that provides the current client.

        If a command in the context shows that the server is unavailable or demoted, the client is
        dropped, so that the next use creates another. If the server only lacks replicas, it is
        still the primary, and the client is retained.

        Raises:
            RedisUnavailable: the server is down, or is not a primary that accepts writes.
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
        """Close the current client as soon as no thread uses it. The next use creates another."""
        if (held := self._shared) is not None:
            self._drop(held)

    def _take(self) -> tuple[_SharedClient, bool]:
        """Return (client, is_due). If `is_due` is True, the caller must check the client's idle
        connections.

        Wait while another thread checks the connections. The pool is empty during the check, so
        each caller would add a connection to the pool.
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
            if held.is_checked_now:  # the check raised an error
                held.is_checked_now = False
                self._lock.notify_all()
            held.users -= 1
            is_free = held.is_dropped and held.users == 0
        if is_free:
            close(held.client)


def _check_idle(held: _SharedClient) -> None:
    """Check the server's role on each idle connection.

    A pool reuses the connection that was used last. After a failover, the other connections may
    lead to the old server, and without this check the failover would remain unnoticed until one of
    them is used.
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
    """Return a context manager that provides a client with one connection, and checks the server's
    role at the end.

    If the server was demoted meanwhile, it discards the writes that it accepted in the context,
    without an error. A cluster's servers are not checked: their replicas accept no writes, and the
    client finds the primaries.

    Raises:
        redis.ReadOnlyError: the server is a replica now.
        redis.RedisError: the server cannot be asked for its role.
    """
    if isinstance(client, load().RedisCluster):
        yield client
        return
    with client.client() as bound:
        yield bound
        bound.connection.check_role()
