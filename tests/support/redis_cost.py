"""Cost of commands in Redis itself: the CPU time of the longest one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.client import Pipeline

MAX_CALL_US = 5000
"""Limit of the CPU time of one command, script or pipeline in Redis, in us."""
_RUNS = 3


def longest_call_us(
    at_redis: redis.Redis, prepare: Callable[[int], object], work: Callable[[int], object]
) -> int:
    """Return the CPU time of the longest command of `work` in us, the minimum of several runs.

    Args:
        at_redis: a client of the server that only `work` uses.
        prepare: stores the data before each run, whose number it gets.
        work: the work to measure; it gets that number, too.
    """
    longest = []
    for run in range(_RUNS):
        prepare(run)
        with measure_calls(at_redis) as calls:
            work(run)
        longest.append(max(calls))
    return min(longest)


@contextmanager
def measure_calls(at_redis: redis.Redis) -> Iterator[list[int]]:
    """Yield the CPU times of all commands of this process while the context is open."""
    calls: list[int] = []
    execute = redis.Redis.execute_command
    execute_all = Pipeline.execute

    def cpu_us() -> int:
        cpu = execute(at_redis, "INFO", "cpu")
        return round(10**6 * (cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]))

    def measuring(call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            before = cpu_us()
            try:
                return call(*arguments, **options)
            finally:
                calls.append(cpu_us() - before)

        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis.Redis, "execute_command", measuring(execute))
        patch.setattr(Pipeline, "execute", measuring(execute_all))
        yield calls
