"""Cost of commands in Redis itself: the CPU time of the longest one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.client import Pipeline

MAX_CALL_US = 5000
"""Limit of the CPU time of one command, script or pipeline in Redis, in us."""
_RUNS = 5
_REFERENCE = "for i = 1, 4000 do redis.call('HGET', KEYS[1], 'f') end"
_REFERENCE_US = 650
"""CPU time of `_REFERENCE` on a quiet machine. Others, and busy ones, are that much slower."""


def longest_call_us(
    at_redis: redis.Redis, prepare: Callable[[int], object], work: Callable[[int], object]
) -> int:
    """Return the CPU time of the longest command of `work` in us.

    It is the minimum of several runs, of each call if all runs make the same: what else the machine
    does only makes calls longer. A run counts in units of what `_REFERENCE` takes behind it.

    Args:
        at_redis: a client of the server that only `work` uses.
        prepare: stores the data before each run, whose number it gets.
        work: the work to measure; it gets that number, too.
    """
    runs: list[list[int]] = []
    for run in range(_RUNS):
        prepare(run)
        with measure_calls(at_redis) as calls:
            work(run)
        slowness = max(1.0, _reference_us(at_redis) / _REFERENCE_US)
        runs.append([round(call / slowness) for call in calls])
    if len(set(map(len, runs))) > 1:
        return min(map(max, runs))
    return max(map(min, zip(*runs, strict=True)))


def _reference_us(at_redis: redis.Redis) -> float:
    """Return the CPU time of `_REFERENCE` in us, the median of several calls."""
    with measure_calls(at_redis) as calls:
        for _ in range(9):
            at_redis.eval(_REFERENCE, 1, "no such key")
    return statistics.median(calls)


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
