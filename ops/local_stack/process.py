"""Child process that is started in its own session, and ended together with its own children."""

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
    """A child process whose output is written to a log file.

    The child leads a new session. A terminal's Ctrl-C therefore reaches only the parent process.
    The child's own children, such as the processes of Triton's models, can be ended together with
    the child.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        """Create the object and an empty log. The process is not started yet."""
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
        """The child's process id. Raises RuntimeError if the child was not started."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the process, for the first time or after `reap`. Output is appended to the log."""
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
        """Return the child's exit code, or minus the signal that ended it; None while it runs.

        An ended child is not reaped here. Its process id, which is also its group id, thus remains
        reserved until `reap` has killed the group.
        """
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def children(self, name: str) -> set[int]:
        """Return the ids of running processes called `name` whose parent is this child."""
        found = set()
        every = {name for name in os.listdir("/proc") if name.isdigit()}
        # Read the parent of each process only once, to save CPU time. A process with another parent
        # is skipped in later calls. It cannot become a child of `self`: when its parent ends, the
        # kernel gives it to a reaper, such as init.
        self._of_others &= every
        for number in every - self._of_others:
            with suppress(OSError):  # the process may have ended meanwhile
                # Split at the last ")": the process name is in parentheses, and may itself contain
                # parentheses. The kernel truncates the name to 15 bytes (proc(5)).
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
        """Return a text for the user: the exit status, and the last lines of the log."""
        status = self.exit_status() or 0
        how = f"exit code {status}" if status >= 0 else f"killed by signal {-status}"
        return f"{self.name} ended ({how}); the end of {self.log}:\n{self.last_lines()}"

    def last_lines(self, count: int = LAST_LINES) -> str:
        """Return the last `count` lines of the log, without the tables that Triton prints."""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            lines = (line for line in log if line.strip() and line[0] not in "|+")
            return "".join(f"  | {line}" for line in deque(lines, maxlen=count)).rstrip()

    def terminate(self) -> None:
        """Send SIGTERM to the child. Do nothing if it was not started."""
        if self.is_started:
            os.kill(self.pid, signal.SIGTERM)

    def reap(self, grace: float) -> None:
        """Wait up to `grace` seconds until the child ends. Then kill the rest of its process group.

        Does nothing if the child was not started.
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
    """Make this process the parent of descendants whose own parent has ended.

    `Child.reap` waits for such descendants, and a process can wait only for its own children.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap_group(group: int) -> None:
    while True:
        try:
            os.waitpid(-group, 0)
        except ChildProcessError:
            return
