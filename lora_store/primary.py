"""Client of the primary (the Redis server that accepts writes), and classification of Redis errors.

All code of the project uses Redis through this module. The address of Redis may belong to a
Kubernetes Service, a proxy or a DNS name. After a failover, the address leads to another server,
but open connections still lead to the old primary. The client is therefore closed as soon as its
server is no longer the primary, and a new client connects to the address again.
`lora_store.redis_role` asks servers for their role.

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
# Error codes by the name of redis-py's exception class. redis-py removes the code from the texts of
# these errors.
_CODE_BY_CLASS = {
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "OutOfMemoryError": "OOM",
}
# Matches the error code in a message, after optional prefixes. redis-py adds a prefix to errors in
# a pipeline, and Redis before version 7 adds a prefix to errors in a script.
_CODE = re.compile(
    r"(?:Command # \d+ \(.*\) of pipeline caused error: )?"
    r"(?:Error running script \(call to \w+\): @user_script: ?\d+: (?:@user_script: ?\d+: )?)?"
    r"-?([A-Z]+) ",
    re.DOTALL,
)


class RedisUnavailable(Exception):
    """No Redis server that accepts writes is available.

    The message contains no addresses and no passwords.
    """


def code_of(error: BaseException) -> str:
    """Return the code of an error from the Redis server, such as "OOM". Return "" for other errors.

    The code is also found if the error occurred in a script.
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
    """Return True if the error means that the server refuses all writes but answers reads."""
    return code_of(error) in _REFUSED


def failure_types() -> tuple[type[Exception], ...]:
    """Return the exception classes that a command within `Primary.use` can raise."""
    return (errors().RedisError, RedisUnavailable)


@dataclass(eq=False)
class _SharedClient:
    """A redis-py client that threads share.

    Attributes:
        client: the client.
        connections: the client's connections; empty for a cluster.
        users: number of threads that use the client now.
        is_dropped: True if the client must be closed when no thread uses it any longer.
        is_checked_now: True while a thread checks if idle connections lead to the primary.
        check_due: monotonic time at which idle connections must be checked again.
    """

    client: Any
    connections: WeakSet[Any]
    users: int = 0
    is_dropped: bool = False
    is_checked_now: bool = False
    check_due: float = 0.0


class Primary:
    """Holder of one redis-py client for the current primary. All threads share the client.

    The first call of `use` creates the client. Thread-safe.
    """

    def __init__(
        self, url: RedisUrl, timeout_s: float, *, connect_timeout_s: float | None = None
    ) -> None:
        """Create the holder. `use` creates the client and connects.

        Args:
            url: the server, the sentinels or the cluster.
            timeout_s: timeout of each command at one server, in seconds.
            connect_timeout_s: timeout of each connect, in seconds; None to use `timeout_s`.
        """
        self.url = url
        self.generation = 0
        """Number of clients created so far. A new client may use a different server."""
        self._timeout_s = timeout_s
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._lock = threading.Condition()
        self._shared: _SharedClient | None = None

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Return a context manager that provides the current client.

        If a command in the context fails because the server is unavailable or no longer the
        primary, the next call of `use` creates a new client. If a command fails because the server
        has too few replicas, the client remains in use, because the server is still the primary.

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
        """Close the current client when no thread uses it any longer.

        The next use creates a new client.
        """
        if (held := self._shared) is not None:
            self._drop(held)

    def _take(self) -> tuple[_SharedClient, bool]:
        """Return the client, and True if the caller must check the client's idle connections.

        Wait while another thread checks the idle connections. The other thread takes all of them
        out of the pool during the check, so this thread would open an additional connection.
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
    """Check that each idle connection of the client leads to the primary.

    A connection pool reuses the connection that was used last. After a failover, the other
    connections may still lead to the old server. Without this check, such a connection would be
    detected only when a command uses it.
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
    """Yield a client with one connection, and check at the end that its server is the primary.

    A server that is demoted while the context is open may discard the writes in the context without
    an error. The check detects the demotion. Servers of a cluster are not checked: a replica in a
    cluster accepts no writes, and the client of the cluster finds the primaries itself.

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
