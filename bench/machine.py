"""The machine: what it is, and which process runs on which of its cores."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
# Settings of a gateway that a run may compare; they go through to it.
_SETTINGS = {"GATEWAY_LOG_LEVEL", "GATEWAY_TRITON_TRANSPORT", "GATEWAY_WORKERS"}
_PACKAGES = ("uvicorn", "uvloop", "grpcio", "protobuf", "h2", "tokenizers", "nvidia-pytriton")


def pin(cores: Iterable[int]) -> None:
    """Binds this process to cores; what it starts inherits them."""
    os.sched_setaffinity(0, cores)


def pin_family(pid: int, cores: Iterable[int]) -> None:
    """Binds a process that runs already, its children and all their threads."""
    process = psutil.Process(pid)
    for member in [process, *process.children(recursive=True)]:
        for thread in member.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


@dataclass(frozen=True)
class Cores:
    """Who runs where. On fewer than 4 cores client and upstream share what the gateway leaves."""

    gateway: tuple[int, ...]
    upstream: tuple[int, ...]
    client: tuple[int, ...]


def cores_for(workers: int) -> Cores:
    """The gateway gets a core for each worker and nothing else runs there."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < workers + 1:
        return Cores(tuple(every), tuple(every), tuple(every))
    # From the end: interrupts tend to be on the first core.
    gateway, rest = every[-workers:], every[:-workers]
    if len(rest) < 3:
        return Cores(tuple(gateway), tuple(rest), tuple(rest))
    half = len(rest) // 2
    return Cores(tuple(gateway), tuple(rest[:half]), tuple(rest[half:]))


def describe() -> dict[str, str]:
    """What a reader needs to know to compare figures."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    found = {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load at start": f"{os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["commit"] = _commit()
    found |= {name: os.environ[name] for name in sorted(os.environ) if name in _SETTINGS}
    return found


class Others:
    """What ran on the machine besides this process and its children, from construction on."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before = self._elsewhere_s()

    def cores(self) -> float:
        """How many cores others kept busy on average, the hypervisor's included.

        To be asked when all children have ended: until then theirs counts as others'.
        """
        return (self._elsewhere_s() - self._before) / (time.monotonic() - self._started)

    @staticmethod
    def _elsewhere_s() -> float:
        every, own = psutil.cpu_times(), os.times()
        busy = every.user + every.system + every.irq + every.softirq + every.steal
        return float(busy - sum(own[:4]))


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
