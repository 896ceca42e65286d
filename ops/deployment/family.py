"""All processes of one launch, wherever they went: each carries a mark in its environment.

mpirun puts every rank into a process group of its own, and what a rank starts may leave its
session; the environment is inherited by all of them.
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
KILLED_WITHIN = 5.0  # seconds; the kernel may be busy freeing a GPU's memory


@dataclass(frozen=True)
class Member:
    """A process of the family, with its command line."""

    pid: int
    arguments: tuple[str, ...]


class ProcessFamily:
    """Linux only, and only processes of this user can be seen."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` with the mark, for the first process of the family."""
        return dict(environ) | {VARIABLE: self._mark}

    def members(self) -> Iterator[Member]:
        """The living ones; those that ended but were not waited for are left out."""
        mark = f"{VARIABLE}={self._mark}".encode()
        for folder in PROC.glob("[0-9]*"):
            # It may end while it is looked at, or be another user's.
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    arguments = (folder / "cmdline").read_bytes().decode(errors="replace")
                    yield Member(int(folder.name), tuple(arguments.split("\0")[:-1]))

    def kill(self) -> None:
        """Returns when none is left, or raises StackError after `KILLED_WITHIN` seconds."""
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
    """Waits for those of our children that have ended already."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
