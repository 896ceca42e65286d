"""Helpers for stopped processes, whose signals stay pending."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from tests.support.patience import PATIENCE_S


def stop(process: psutil.Process) -> None:
    """Stop a process, and return once it has stopped, some time after SIGSTOP.

    Until then the process handles other signals. The kernel delivers the lowest number first, so a
    SIGTERM right after the SIGSTOP would be handled before it.
    """
    process.suspend()
    deadline = time.monotonic() + PATIENCE_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.01)


def wait_until_sent(pid: int, number: signal.Signals) -> None:
    """Wait until the signal is pending for a stopped process."""
    deadline = time.monotonic() + PATIENCE_S
    while not _waiting(pid) >> (number - 1) & 1:
        assert time.monotonic() < deadline, f"no {number.name} was sent"
        time.sleep(0.01)


def _waiting(pid: int) -> int:
    """Return the pending signals of a process as a bit mask (proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("ShdPnd:")[2].split()[0], 16)
