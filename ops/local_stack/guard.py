"""Guard process that kills the servers if the process that started them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress


class Guard:
    """A forked process that kills the registered process groups when its parent process dies.

    The kernel's PR_SET_PDEATHSIG is not enough, because it ends only the servers. If Triton dies
    while it loads its models, the processes of its Python models wait for Triton forever. The guard
    inherits the parent's file locks, so no other stack can use the state folder before the clean-up
    has ended.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        """Fork the guard process. After killing the process groups, the guard calls `clean_up`."""
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                _guard(reader, clean_up)
            finally:
                os._exit(0)
        os.close(reader)

    def add(self, group: int) -> None:
        os.write(self._writer, f"+{group}\n".encode())

    def remove(self, group: int) -> None:
        """Unregister a group whose processes have all ended, because its id may be reused."""
        os.write(self._writer, f"-{group}\n".encode())

    def close(self) -> None:
        """Let the guard kill the groups that are still registered, and wait for its end."""
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def _guard(reader: int, clean_up: Callable[[], None]) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # close stdout and stderr: readers would wait for the guard
        os.dup2(nowhere, stream)
    groups: set[int] = set()
    with os.fdopen(reader) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    clean_up()
