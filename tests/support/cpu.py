"""CPU time: the cost of work, independent of the machine's load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def cpu_seconds(pid: int | None = None) -> float:
    """Return the CPU time of a process, by default this one, and its children so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@contextmanager
def costs_less_than(seconds: float, pid: int | None = None) -> Iterator[None]:
    """Assert that the process, by default this one, uses less CPU time while the body runs."""
    before = cpu_seconds(pid)
    yield
    used = cpu_seconds(pid) - before
    assert used < seconds, f"{used:.2f} s of CPU time"
