"""A runner of the real `gateway up` for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ops.local_stack.state import FILE_NAME
from ops.local_stack.state import StackState as Stack

# Time limits in seconds, only for a test that hangs. A few seconds are normal.
READY_WITHIN = 240.0
STOPPED_WITHIN = 120.0
SHARED_MEMORY = Path("/dev/shm")


class Up:
    """A `gateway up` process, killed at the end of the `with` block if still running."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        load_models: Sequence[str] = ("tensorrt_llm",),
        **settings: str,
    ) -> None:
        """Start the process in `folder`. `settings` become GATEWAY_ variables.

        Text models are loaded only on request (`load_models=()` loads all), as each imports
        transformers in 2 s of CPU time.
        """
        self.state_dir = folder / "state"
        self.adapter_root = folder / "adapter-root"
        self.adapter_root.mkdir()
        self._stdout, self._stderr = folder / "stdout.log", folder / "stderr.log"
        settings = {
            "adapter_root": str(self.adapter_root),
            "max_adapter_bytes": str(8 * 1024 * 1024),
        } | settings
        environment = {f"GATEWAY_{name.upper()}": value for name, value in settings.items()}
        only = [word for name in load_models for word in ("--load-model", name)]
        command = [sys.executable, "-m", "ops", "up", "--state-dir", str(self.state_dir), *only]
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdout=stdout,
                stderr=stderr,
                env=os.environ | environment,
            )
        self._processes: set[psutil.Process] = set()
        self._shm_prefix = ""

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    def state(self) -> Stack:
        return Stack.read(self.state_dir)

    def wait_for(self, text: str, within: float = READY_WITHIN, count: int = 1) -> None:
        """Wait until `text` is `count` times in the command's output."""
        deadline = time.monotonic() + within
        while (self.stdout + self.stderr).count(text) < count:
            assert self._process.poll() is None, f"`gateway up` ended:\n{self.stderr}"
            assert time.monotonic() < deadline, f"no {text!r} in {within} s:\n{self.stderr}"
            time.sleep(0.02)

    def wait_ready(self) -> Stack:
        self.wait_for("ready: http://")
        return self.state()

    def remember_processes(self) -> list[psutil.Process]:
        """Return all processes of the stack, including Triton, for `assert_nothing_is_left`."""
        deadline = time.monotonic() + READY_WITHIN
        while True:
            found = psutil.Process(self._process.pid).children(recursive=True)
            self._processes.update(found)
            for process in found:
                with suppress(psutil.NoSuchProcess):  # a process that has just ended
                    arguments = " ".join(process.cmdline())
                    if prefix := re.search(r"shm-region-prefix-name=(\w+)", arguments):
                        self._shm_prefix = prefix[1]
                        return found
            assert self._process.poll() is None, f"`gateway up` ended:\n{self.stderr}"
            assert time.monotonic() < deadline, "Triton does not run"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, within: float = STOPPED_WITHIN) -> int:
        """Wait for the command to end, and return the exit code."""
        return self._process.wait(within)

    def assert_nothing_is_left(self, within: float = 60.0) -> None:
        """Check that no remembered process, shared memory region, socket or state.json remains."""
        assert self._processes
        deadline = time.monotonic() + within
        while (left := [p for p in self._processes if _runs(p)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
        assert self._shm_prefix
        assert not [region.name for region in SHARED_MEMORY.glob(f"{self._shm_prefix}*")]
        assert not [path for path in self.state_dir.rglob("*") if path.is_socket()]
        assert not (self.state_dir / FILE_NAME).exists()


def _runs(process: psutil.Process) -> bool:
    try:
        # Orphans of a killed stack stay zombies until init reaps them.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
