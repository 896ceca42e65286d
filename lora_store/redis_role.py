"""Detection of Redis servers that are no longer the primary after a failover.

Each connection asks its server for the server's role, which is primary or replica. The connection
does so when it is opened, and before a command if the last check is more than `ROLE_CHECK_S`
seconds ago. A gateway that only reads therefore also detects a failover.

With sentinels, the connection also asks the sentinels which server is the primary (their "master").
After a failover, the old primary may not know yet that it was demoted. It would then accept writes
that are lost later.

See decision 079 in docs/decisions.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakSet

log = logging.getLogger(__name__)

ROLE_CHECK_S = 2.0
_SILENT_S = 30.0
"""Seconds for which a sentinel that did not answer is skipped, if another sentinel answers."""
_ROLES = {
    "slave": "replica",
    "replica": "replica",
    "master": "primary",
    "active-replica": "primary",  # KeyDB's active replicas accept writes
}
# Commands that return the role. Every user may call HELLO, but servers before version 6.2 reject
# HELLO without arguments. ROLE is used in this case.
_QUESTIONS = ("HELLO", "ROLE")


def role_of(answer: object) -> str | None:
    """Return "primary" or "replica", given the answer to HELLO or ROLE.

    Return None if the answer has no known role.
    """
    if isinstance(answer, Mapping):
        told = answer.get(b"role", answer.get("role"))
    elif isinstance(answer, list | tuple) and answer:
        fields = [_text(each) for each in answer]
        # Distinguish two lists. In RESP2, HELLO returns a flat list of names and values. ROLE
        # returns a list that begins with the role.
        at = fields[::2].index("role") * 2 + 1 if "role" in fields[::2] else 0
        told = answer[at]
    else:
        return None
    return _ROLES.get(_text(told))


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def greet(known: WeakSet[Any], connection: Any) -> None:
    """Initialize a new connection, check its server's role, and add the connection to `known`.

    redis-py calls this function for each new connection: the function is passed to redis-py as the
    option `redis_connect_func`, with the argument `known` already bound.
    """
    known.add(connection)
    connection.role_due = math.inf  # do not check the role before the commands of `on_connect`
    connection.on_connect()
    connection.check_role()


@cache
def make_checked_class(kind: Any) -> Any:
    """Return a subclass of the connection class `kind` that checks the server's role regularly.

    Connections of this class must be initialized by `greet`.
    """
    errors = import_module("redis").exceptions

    class Checked(kind):  # type: ignore[misc]
        role_due = math.inf

        def check_health(self) -> None:
            if time.monotonic() >= self.role_due:
                self.check_role()
            super().check_health()

        def check_role(self) -> None:
            """Raise ReadOnlyError, and disconnect, if the server is not the primary."""
            self.role_due = math.inf
            try:
                self._ask()
            except BaseException:
                self.disconnect()
                raise
            self.role_due = time.monotonic() + ROLE_CHECK_S

        def _ask(self) -> None:
            role = None
            for question in _QUESTIONS:
                self.send_command(question, check_health=False)
                try:
                    role = role_of(self.read_response())
                except errors.ResponseError:
                    continue  # the command is unknown, or forbidden for this user
                if role is not None:
                    break
            if role is None:
                _warn_of_unknown_roles()
            # With sentinels, also check that the sentinels return this server as the current
            # master. Only connections through sentinels have the attribute `connection_pool`.
            chosen_by = getattr(self, "connection_pool", None)
            is_other = chosen_by is not None and chosen_by.sentinel_manager.discover_master(
                chosen_by.service_name
            ) != (self.host, self.port)
            if role == "replica" or is_other:
                raise errors.ReadOnlyError("not the primary")

    Checked.__name__ = f"Checked{kind.__name__}"
    return Checked


@cache
def _warn_of_unknown_roles() -> None:
    log.warning(
        "GATEWAY_REDIS_URL: the server reports its role neither by HELLO nor by ROLE, so a "
        "demotion is noticed only when it refuses a write; let this user run one of them"
    )


@cache
def agreeing_sentinels() -> Any:
    """Return a subclass of `redis.Sentinel` that asks several sentinels for the current master.

    After a network partition, some sentinels may still return the old master. Sentinels number
    their failovers (`config-epoch`), so the answer with the highest number is used. Otherwise
    clients could alternate between two masters.
    """
    redis = import_module("redis")

    class AgreeingSentinels(redis.Sentinel):  # type: ignore[misc, name-defined]
        sentinels: list[Any]

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # Monotonic time until which a sentinel is skipped because it did not answer. All
            # threads share this dict.
            self.silent_until: dict[Any, float] = {}

        def discover_master(self, service_name: str) -> tuple[str, int]:
            """Return (host, port) of the master.

            Sentinels are asked one after another, until a majority of all sentinels agrees. The
            answer with the highest failover number is used. Raise MasterNotFoundError if no
            sentinel knows a master, or if this answer says that the master is down.
            """
            known = list(self.sentinels)
            silent_until = self.silent_until
            found: list[tuple[int, bool, tuple[str, int]]] = []
            # First ask the sentinels that answered last time. Then ask the other sentinels, in the
            # order of their last failures.
            for sentinel in sorted(known, key=lambda each: silent_until.get(each, 0.0)):
                # If an earlier sentinel has named a master that is up, skip sentinels that recently
                # did not answer. Waiting for their timeouts would delay each connection's checks.
                is_known = any(is_up for _, is_up, _ in found)
                if is_known and time.monotonic() < silent_until.get(sentinel, 0.0):
                    continue
                try:
                    state = sentinel.sentinel_masters().get(service_name)
                except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
                    silent_until[sentinel] = time.monotonic() + _SILENT_S
                    continue
                silent_until.pop(sentinel, None)
                if state:
                    is_up = self.check_master_state(state, service_name)
                    found.append((state["config-epoch"], is_up, (state["ip"], state["port"])))
                    if is_up and 2 * found.count(found[-1]) > len(known):
                        break
            if not found or not max(found)[1]:
                # Use another text than redis-py, whose text may contain the sentinels' passwords.
                raise redis.sentinel.MasterNotFoundError("no sentinel names a master that is up")
            return max(found)[2]

    return AgreeingSentinels
