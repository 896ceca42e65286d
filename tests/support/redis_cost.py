"""CPU time that commands take in Redis itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.client import Pipeline

MAX_CALL_US = 5000
"""Limit of the CPU time of one command, script or pipeline in Redis, in microseconds."""
_RUNS = 5
_REFERENCE = "for i = 1, 4000 do redis.call('HGET', KEYS[1], 'f') end"
_REFERENCE_US = 650
"""CPU time of `_REFERENCE` on a quiet machine, in microseconds. It calibrates slower machines."""


def longest_call_us(
    at_redis: redis.Redis, prepare: Callable[[int], object], work: Callable[[int], object]
) -> int:
    """Return the CPU time of the longest command of `work` in microseconds, on a quiet machine.

    The result is the minimum over several runs, since other load only makes calls longer. If all
    runs make the same calls, the minimum is taken per call. Each run is scaled by the time of
    `_REFERENCE` right after it.

    Args:
        at_redis: a client of the server that only `work` uses.
        prepare: stores the data before each run; called with the number of the run.
        work: the work to measure; called with the number of the run.
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
    """Return the median CPU time of `_REFERENCE` in microseconds."""
    with measure_calls(at_redis) as calls:
        for _ in range(9):
            at_redis.eval(_REFERENCE, 1, "no such key")
    return statistics.median(calls)


@contextmanager
def measure_calls(at_redis: redis.Redis) -> Iterator[list[int]]:
    """Yield a list that collects the CPU time of each command that this process sends."""
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
