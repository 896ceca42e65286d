"""One child process: started in a group of its own, watched, and ended with all it started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LAST_LINES = 25


class Child:
    """A child process whose output goes to a log file.

    It leads a session, so that a terminal's Ctrl-C reaches only us and that its own children
    (Triton's Python stubs) can be ended with it.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        """Nothing is started; an old log is emptied."""
        self.name = name
        self.log = log
        log.write_bytes(b"")
        self._command = list(command)
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._of_others: set[str] = set()

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """Raises RuntimeError when it was not started."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    def start(self) -> None:
        """Starts it, or starts it again after `reap`; the log goes on."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_status(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs.

        An ended child is left unreaped, so that its group's id is not given to others.
        """
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def children(self, name: str) -> set[int]:
        """The processes of that name that it started itself and that run."""
        found = set()
        every = {name for name in os.listdir("/proc") if name.isdigit()}
        # A process keeps its parent as long as that lives: who was looked at is not read again.
        self._of_others &= every
        for number in every - self._of_others:
            with suppress(OSError):  # it has ended meanwhile
                # The name is in parentheses and may hold others; 15 bytes of it are kept (proc(5)).
                head, _, rest = (
                    Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")
                )
                pid, _, found_name = head.partition(" (")
                state, parent, *_ = rest.split()
                if int(parent) != self.pid:
                    self._of_others.add(number)
                elif found_name == name[:15] and state not in "ZX":
                    found.add(int(pid))
        return found

    def how_it_ended(self) -> str:
        """What `exit_status` says, and the last lines of the log."""
        status = self.exit_status() or 0
        how = f"exit code {status}" if status >= 0 else f"killed by signal {-status}"
        return f"{self.name} ended ({how}); the end of {self.log}:\n{self.last_lines()}"

    def last_lines(self, count: int = LAST_LINES) -> str:
        """The end of the log without tables: Triton prints long ones after what went wrong."""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            lines = (line for line in log if line.strip() and line[0] not in "|+")
            return "".join(f"  | {line}" for line in deque(lines, maxlen=count)).rstrip()

    def terminate(self) -> None:
        """Asks it to end; does nothing when it was not started."""
        if self.is_started:
            os.kill(self.pid, signal.SIGTERM)

    def reap(self, grace: float) -> None:
        """Waits up to `grace` seconds for its end, then kills what is left of its group.

        Does nothing when it was not started.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + grace
        while self.exit_status() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        _reap_group(self.pid)
        self._process = None


def adopt_orphans() -> None:
    """Makes grandchildren whose parent died our children, so that `reap` can wait for them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap_group(group: int) -> None:
    while True:
        try:
            os.waitpid(-group, 0)
        except ChildProcessError:
            return
