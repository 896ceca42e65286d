"""The processes of one launch of tritonserver, identified by an inherited environment variable.

Process groups and sessions do not identify these processes: mpirun puts every rank into a separate
group, and the child processes of a rank may start their own sessions.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ops.local_stack.errors import StackError

VARIABLE = "GATEWAY_LAUNCH"
PROC = Path("/proc")
KILLED_WITHIN = 5.0  # seconds; the kernel may need time to free a GPU's memory


@dataclass(frozen=True)
class Member:
    """A process of a launch: its id and its command line."""

    pid: int
    arguments: tuple[str, ...]


class ProcessFamily:
    """The first process of a launch of tritonserver, and all its descendants.

    Requires Linux, and finds only the processes of the current user.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with which to start the family's first process.

        It is `environ` plus the variable GATEWAY_LAUNCH, whose random value identifies the family.
        """
        return dict(environ) | {VARIABLE: self._mark}

    def members(self) -> Iterator[Member]:
        """Yield the family's running processes, without zombies."""
        mark = f"{VARIABLE}={self._mark}".encode()
        for folder in PROC.glob("[0-9]*"):
            # Ignore errors: the process may have ended meanwhile, or belong to another user.
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    arguments = (folder / "cmdline").read_bytes().decode(errors="replace")
                    yield Member(int(folder.name), tuple(arguments.split("\0")[:-1]))

    def kill(self) -> None:
        """Kill all processes of the family, and return when they have ended.

        Raises StackError if a process is still there after `KILLED_WITHIN` seconds.
        """
        deadline = time.monotonic() + KILLED_WITHIN
        while members := list(self.members()):
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
            reap_orphans()
            if time.monotonic() > deadline:
                raise StackError(f"processes {[m.pid for m in members]} do not end")
            time.sleep(0.02)


def reap_orphans() -> None:
    """Reap the child processes of this process that have ended. Do not wait for running ones."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
