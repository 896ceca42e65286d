"""Ends the servers when this process is killed and cannot do so itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress


class Guard:
    """A forked process that waits for this one's death, then kills the groups it was told of.

    The kernel's PR_SET_PDEATHSIG would reach the servers alone: Triton's Python stubs, when
    their server dies while it loads them, wait for it for ever. The guard inherits the locks
    that are held when it is made, so the next stack waits for the end of the clean-up.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        """`clean_up` is run after the groups were killed."""
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
        """To be called when nothing of the group is left, for its id may come again."""
        os.write(self._writer, f"-{group}\n".encode())

    def close(self) -> None:
        """The guard ends; groups that were not removed are killed."""
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def _guard(reader: int, clean_up: Callable[[], None]) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # whoever reads our output need not wait for the guard
        os.dup2(nowhere, stream)
    groups: set[int] = set()
    with os.fdopen(reader) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    clean_up()
