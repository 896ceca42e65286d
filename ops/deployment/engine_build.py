"""Runner of the steps of an engine plan, on a machine with TensorRT-LLM."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from adapters.config_json import FILE
from ops.deployment.engine_plan import EnginePlan, Step

STOP_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
POLL_PERIOD = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class BuildError(RuntimeError):
    """A step of an engine plan has failed, or a program or script for it is missing."""


def check_installed(plan: EnginePlan) -> None:
    """Raise BuildError, with a list, if programs or scripts for the plan are missing."""
    missing = [
        need
        for need in dict.fromkeys(need for step in plan.steps for need in step.needs)
        if not (Path(need).is_file() if "/" in need else shutil.which(need))
    ]
    if missing:
        raise BuildError(
            f"not found: {', '.join(missing)}. --run needs TensorRT-LLM {plan.release} as in "
            "NVIDIA's Triton containers: trtllm-build on PATH and, named with --trtllm-examples, "
            "the folder `examples` of its source"
        )


def build(plan: EnginePlan) -> int:
    """Run all steps of an engine plan. The steps write to the stdout and stderr of this process.

    Return 0, or 128 plus the signal's number after SIGINT or SIGTERM. Such a signal ends the
    running step and its child processes, and no further step starts. Files written so far remain.
    Call this function from the main thread, because it installs signal handlers.

    Raises BuildError if a program or script is missing, a step fails, or no engine is produced.
    """
    check_installed(plan)
    stop = _SignalFlag()
    earlier = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        for step in plan.steps:
            _print_line(f"{step.name}: {shlex.join(step.arguments)}")
            status = _run(step, stop)
            if stop.number:
                _print_line(f"{step.name}: stopped")
                return 128 + stop.number
            if status:
                how = f"exit code {status}" if status > 0 else f"killed by signal {-status}"
                raise BuildError(f"{step.name} failed ({how})")
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if not (plan.engine_dir / FILE).exists():
        raise BuildError(f"trtllm-build left no {plan.engine_dir / FILE}")
    return 0


class _SignalFlag:
    """A signal handler that records the first signal.

    `number` is the number of that signal, or 0 if no signal has been received.
    """

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, _: object) -> None:
        self.number = self.number or number


def _run(step: Step, stop: _SignalFlag) -> int:
    """Run a step to its end or until a signal, and end all its processes.

    Return the exit code, or minus the number of the signal that ended the step.
    """
    # Start the step in a new process group, so that a terminal's Ctrl-C does not reach the step,
    # and that all processes of the step can be killed at once.
    process = subprocess.Popen(step.arguments, stdin=subprocess.DEVNULL, process_group=0)
    while not _has_ended(process) and not stop.number:
        time.sleep(POLL_PERIOD)
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(POLL_PERIOD)
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if the process has ended. An ended process is not reaped here.

    The process id is also the id of the process group. While the process is a zombie, the kernel
    cannot give this id to another group, so `_run` can kill the group safely.
    """
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
