"""Processes that are stopped, so that the signals they are sent wait for them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from tests.support.patience import PATIENCE_S


def stop(process: psutil.Process) -> None:
    """Returns once it does nothing, which is some time after SIGSTOP was sent.

    Until then it still takes other signals: the kernel hands out the lowest number first, so a
    SIGTERM that is sent right behind the SIGSTOP is taken before it.
    """
    process.suspend()
    deadline = time.monotonic() + PATIENCE_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.01)


def wait_until_sent(pid: int, number: signal.Signals) -> None:
    """Until a stopped process was sent a signal, which it can't have taken."""
    deadline = time.monotonic() + PATIENCE_S
    while not _waiting(pid) >> (number - 1) & 1:
        assert time.monotonic() < deadline, f"no {number.name} was sent"
        time.sleep(0.01)


def _waiting(pid: int) -> int:
    """The signals that wait, as bits (proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("ShdPnd:")[2].split()[0], 16)
