"""Description of the machine for the benchmark's report, and assignment of processes to cores."""

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
# Gateway settings for the report. If the benchmark's environment has them, the gateway inherits
# them.
_SETTINGS = {"GATEWAY_LOG_LEVEL", "GATEWAY_TRITON_TRANSPORT", "GATEWAY_WORKERS"}
_PACKAGES = ("uvicorn", "uvloop", "grpcio", "protobuf", "h2", "tokenizers", "nvidia-pytriton")


def pin(cores: Iterable[int]) -> None:
    """Bind this process, and child processes that it starts from now on, to CPU cores."""
    os.sched_setaffinity(0, cores)


def pin_family(pid: int, cores: Iterable[int]) -> None:
    """Bind a running process, its child processes, and all their threads to cores."""
    process = psutil.Process(pid)
    for member in [process, *process.children(recursive=True)]:
        for thread in member.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


@dataclass(frozen=True)
class Cores:
    """Assignment of CPU cores to the gateway, the scripted upstream and the load client.

    If fewer than 3 cores remain beside the gateway's, the upstream and the client share them.
    """

    gateway: tuple[int, ...]
    upstream: tuple[int, ...]
    client: tuple[int, ...]


def cores_for(workers: int) -> Cores:
    """Return an assignment that gives the gateway an exclusive core for each worker."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < workers + 1:
        return Cores(tuple(every), tuple(every), tuple(every))
    # Take the gateway's cores from the end: interrupts tend to be on the first core.
    gateway, rest = every[-workers:], every[:-workers]
    if len(rest) < 3:
        return Cores(tuple(gateway), tuple(rest), tuple(rest))
    half = len(rest) // 2
    return Cores(tuple(gateway), tuple(rest[:half]), tuple(rest[half:]))


def describe() -> dict[str, str]:
    """Return the hardware and the software versions that affect the measurements, by name."""
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
    """CPU use by processes that do not belong to the benchmark, since this object was created."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before = self._elsewhere_s()

    def cores(self) -> float:
        """Return the average number of cores that other processes and the hypervisor used.

        Call this after all child processes have ended: a running child counts as another process.
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
