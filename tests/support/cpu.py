"""Measurement in CPU time, which depends less on the machine's load than elapsed time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import orjson
import psutil


def cpu_seconds(pid: int | None = None) -> float:
    """Return the CPU seconds so far of a process (this one by default) and its children."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@contextmanager
def costs_less_than(seconds: float, pid: int | None = None) -> Iterator[None]:
    """Assert that code uses less than `seconds` of CPU time of a quiet machine.

    The time is that of this thread, or that of the process `pid` and its children.
    """
    measure = time.thread_time if pid is None else partial(cpu_seconds, pid)
    before = measure()
    yield
    used = measure() - before
    if used >= seconds:
        used /= measure_slowness()
    assert used < seconds, f"{used:.3f} s of CPU time of a quiet machine"


_REFERENCE = orjson.dumps([{"name": f"n{n}", "values": [n, str(n), None]} for n in range(500)])
_REFERENCE_S = 0.00023
"""CPU time of `_work` on a quiet machine, in seconds."""


def measure_slowness() -> float:
    """Return how many times slower this thread runs now than on a quiet machine, at least 1.

    CPU times grow too when other processes use the caches and lower the clock rate.
    """
    return max(1.0, statistics.median(_time(_work) for _ in range(7)) / _REFERENCE_S)


def _work() -> None:
    found = orjson.loads(_REFERENCE)
    sum(len(f"{each['name']}: {each['values']}") for each in found)


def _time(work: Callable[[], None]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started
