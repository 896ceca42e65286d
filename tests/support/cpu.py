"""CPU time: what something costs, whatever else the machine is doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def cpu_seconds(pid: int | None = None) -> float:
    """What a process, this one by default, and those that it started have used so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@contextmanager
def costs_less_than(seconds: float, pid: int | None = None) -> Iterator[None]:
    """Asserts that the process, this one by default, uses less CPU time while the body runs."""
    before = cpu_seconds(pid)
    yield
    used = cpu_seconds(pid) - before
    assert used < seconds, f"{used:.2f} s of CPU time"
