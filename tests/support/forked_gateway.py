"""`python -m gateway` without the cost of imports, forked from a process that has done them once.

Tests start more than a hundred gateways, and imports take two thirds of the CPU time of a start.
The comparison of the demo's tokenizer is skipped too (`compared_words`). Otherwise the gateway is a
normal process with its own environment, signals, workers and exit code. Tests of `gateway up`,
refused settings and images start a new interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gateway.__main__ import main
from tests.support.compared_words import compared, words_compared_once

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class ForkedGateway:
    """The part of `subprocess.Popen`'s interface that tests use."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """Start a gateway with this environment. `log` receives the output."""
        self._process = _CONTEXT.Process(target=_run, args=(dict(environment), log, compared()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, None while the process runs, or -N if signal N ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired("gateway", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(environment: dict[str, str], log: Path, known: frozenset[bytes]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if "LD_PRELOAD" in environment:  # read only at exec
        os.execv(sys.executable, [sys.executable, "-m", "gateway"])
    with words_compared_once(known):
        raise SystemExit(main())
