"""The Redis that takes writes: which errors mean that it cannot be used, and its current client.

All users of Redis in the project go by this module. An address may lead to another server later, by
a Service, a proxy or DNS, while connections to a demoted server stay open. So a client is dropped
as soon as its server is found not to be the primary, and the next use connects anew.
`lora_store.redis_role` asks servers for their role.
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
# redis-py takes the code out of the text of these.
_CODE_BY_CLASS = {
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "OutOfMemoryError": "OOM",
}
# redis-py puts words before the error of a command in a pipeline, and a Redis before 7 before that
# of a command in a script.
_CODE = re.compile(
    r"(?:Command # \d+ \(.*\) of pipeline caused error: )?"
    r"(?:Error running script \(call to \w+\): @user_script: ?\d+: (?:@user_script: ?\d+: )?)?"
    r"-?([A-Z]+) ",
    re.DOTALL,
)


class RedisUnavailable(Exception):
    """No Redis answers that takes writes. The message says why, without addresses or passwords."""


def code_of(error: BaseException) -> str:
    """Return the code of a server's error, also of one inside a script, empty for other errors."""
    code = _CODE_BY_CLASS.get(type(error).__name__)
    if code is not None:
        return code
    found = _CODE.match(str(error)) if isinstance(error, errors().ResponseError) else None
    return found[1] if found else ""


def describe(error: BaseException | None) -> str:
    """Return why a command failed, in words for operators.

    The text of redis-py is left out, because it may hold the sentinels' passwords.
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
    """Return True if the server can be read and takes no writes of anybody."""
    return code_of(error) in _REFUSED


def failures() -> tuple[type[Exception], ...]:
    """Return everything that a command inside `Primary.use` can fail with."""
    return (errors().RedisError, RedisUnavailable)


@dataclass(eq=False)
class _Held:
    """A client, and how many threads use it now."""

    client: Any
    connections: WeakSet[Any]
    users: int = 0
    is_dropped: bool = False
    is_checked_now: bool = False
    check_due: float = 0.0


class Primary:
    """The client of one user of Redis, made when it is needed. For threads."""

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
        """How many clients were made: with each one the server may be another."""
        self._timeout_s = timeout_s
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._lock = threading.Condition()
        self._held: _Held | None = None

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Give the current client.

        Of the threads that meet one demotion, the first drops the client and the others find that
        it is gone already. A server that only lacks replicas is the primary, so its client stays.

        Raises:
            RedisUnavailable: the server is not there, or not a primary that takes writes.
            redis.RedisError: the server refuses this command.
        """
        held: _Held | None = None
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
        if (held := self._held) is not None:
            self._drop(held)

    def _take(self) -> tuple[_Held, bool]:
        """Return the client, and True if the caller is to check its connections.

        Wait while another thread checks them: the pool is empty then, and a connection that is made
        meanwhile would stay, one more with each check.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._held is None or not self._held.is_checked_now)
            held = self._held
            if held is None:
                connections: WeakSet[Any] = WeakSet()
                client = connect(
                    self.url,
                    timeout_s=self._timeout_s,
                    connect_timeout_s=self._connect_timeout_s,
                    connections=connections,
                )
                held = self._held = _Held(client, connections)
                self.generation += 1
            now = time.monotonic()
            is_due = held.users == 0 and now >= held.check_due
            if is_due:
                held.check_due = now + ROLE_CHECK_S
                held.is_checked_now = True
            held.users += 1
            return held, is_due

    def _end_check(self, held: _Held) -> None:
        with self._lock:
            held.is_checked_now = False
            self._lock.notify_all()

    def _drop(self, held: _Held) -> None:
        with self._lock:
            if self._held is held:
                self._held = None
                self._lock.notify_all()
            held.is_dropped = True
            is_free = held.users == 0
        if is_free:
            close(held.client)

    def _give_back(self, held: _Held) -> None:
        with self._lock:
            if held.is_checked_now:  # the check failed
                held.is_checked_now = False
                self._lock.notify_all()
            held.users -= 1
            is_free = held.is_dropped and held.users == 0
        if is_free:
            close(held.client)


def _check_idle(held: _Held) -> None:
    """Ask on each connection that nobody uses.

    A pool gives out the one that was used last. So one that was made after the address had moved
    would hide for long that others lead to the old server.
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
def writing(client: Any) -> Iterator[Any]:
    """Give a client with one connection, whose server is asked for its role afterwards.

    A server that was demoted meanwhile discards what it took, and no answer says so. A cluster is
    not asked: its replicas take no writes, and its client goes to the others.

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
