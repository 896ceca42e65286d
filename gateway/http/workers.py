"""Several processes on one port: a parent that binds, starts workers, and passes signals on.

Python runs one core, so a machine with more has a worker for each. They share the listening socket
(whoever is idle accepts, so a busy worker gets fewer new connections) and nothing that they write.

Workers are forks of the parent, which has imported all that they need and does nothing else: one
starts in a tenth of the time of a new interpreter, and their memory is the parent's until they
change it. The parent must have no other threads: what they held would be held for ever.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

AT_ONCE = signal.SIGUSR2
"""From the parent: end without waiting for anybody. Ends a worker that is still starting, too."""

_FORK = multiprocessing.get_context("fork")
_ENDED_BY = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.1
# A worker that dies at once again must not become a loop that fills the log.
_RESTART_PAUSE_S = 1.0
# Nor one whose settings are wrong: somebody is likely to be writing the file at this moment.
_REFUSED_PAUSE_S = 5.0
_WRONG_SETTINGS = 2


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker is given by its parent.

    Attributes:
        index: its number, from 0.
        count: how many there are.
        listeners: the shared listening sockets: for clients, then for admins where they have a
            port of their own.
        parent: the descriptor of a pipe that ends when the parent does.
        folder: where each worker listens on a socket of its own, `{index}.sock`, for the others.
    """

    index: int
    count: int
    listeners: tuple[socket.socket, ...]
    parent: int
    folder: Path

    def sockets(self) -> list[socket.socket]:
        """What to listen on: the shared sockets and the worker's own."""
        own = socket.socket(socket.AF_UNIX)
        self.socket_of(self.index).unlink(missing_ok=True)
        own.bind(str(self.socket_of(self.index)))
        return [*self.listeners, own]

    @property
    def siblings(self) -> list[Path]:
        """The sockets of the other workers."""
        return [self.socket_of(index) for index in range(self.count) if index != self.index]

    def socket_of(self, index: int) -> Path:
        return self.folder / f"{index}.sock"

    def clean_up(self) -> None:
        """For a worker at its end whose parent has gone: the last one removes the folder."""
        self.socket_of(self.index).unlink(missing_ok=True)
        if not any(sibling.exists() for sibling in self.siblings):
            shutil.rmtree(self.folder, ignore_errors=True)


class Workers:
    """The parent. Use `run`; it belongs to the main thread of a process without others.

    `folder` is one that nobody else uses, and that the workers share. `work` is what a worker does
    with its place; it returns its exit code.
    """

    def __init__(
        self,
        count: int,
        listeners: Sequence[socket.socket],
        folder: Path,
        work: Callable[[Worker], int],
    ) -> None:
        self._count = count
        self._folder = folder
        self._listeners = tuple(listeners)
        self._work = work
        self._children: dict[int, BaseProcess] = {}
        self._started: dict[int, float] = {}
        self._ending = False
        self._code = 0

    def run(self) -> int:
        """Blocks until SIGTERM or SIGINT and the end of all workers; returns the exit code.

        SIGHUP goes to each worker. A second SIGTERM goes to them as `AT_ONCE`: one more SIGTERM
        would be lost on a worker that had no turn since the first.
        """
        with _pipe() as (read, self._write):
            for number in (*_ENDED_BY, signal.SIGHUP):
                signal.signal(number, self._pass_on)
            places = [
                Worker(index, self._count, self._listeners, read, self._folder)
                for index in range(self._count)
            ]
            # What the collector never looks at stays memory of the parent's in each worker.
            gc.collect()
            gc.freeze()
            for place in places:
                self._start(place)
            while self._children:
                time.sleep(_POLL_S)
                if self._ending:
                    # While anybody holds them, the kernel takes connections that nobody serves.
                    for listener in self._listeners:
                        listener.close()
                for place in places:
                    self._look_after(place)
        return self._code

    def _start(self, place: Worker) -> None:
        # None may meet a handler that is the parent's; SIGHUP waits until the worker has its own.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDED_BY, signal.SIGHUP})
        try:
            child = _FORK.Process(target=self._begin, args=(place,))
            child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._children[place.index] = child
        self._started[place.index] = time.monotonic()
        if self._ending:  # told so while it was being started
            _send(child, signal.SIGTERM)

    def _begin(self, place: Worker) -> NoReturn:
        """In the worker."""
        # A terminal's Ctrl-C is for the parent, which passes it on.
        os.setpgid(0, 0)
        os.close(self._write)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDED_BY)
        raise SystemExit(self._work(place))

    def _look_after(self, place: Worker) -> None:
        child = self._children.get(place.index)
        if child is None or (code := child.exitcode) is None:
            return
        refused = code == _WRONG_SETTINGS
        # While others serve, what is wrong has become so after their start: it may be mended.
        serving = any(other.exitcode is None for other in self._children.values())
        if refused and not serving and not self._ending:
            self._code = code
            self._pass_on(signal.SIGTERM, None)
        pause = _REFUSED_PAUSE_S if refused else _RESTART_PAUSE_S
        if self._ending:
            del self._children[place.index]
        elif time.monotonic() - self._started[place.index] > pause:
            print(
                f"gateway: worker {place.index} ended with {code}; starting another",
                file=sys.stderr,
                flush=True,
            )
            self._start(place)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            number = AT_ONCE if self._ending else signal.SIGTERM
            self._ending = True
        for child in self._children.values():
            _send(child, number)


def _send(child: BaseProcess, number: int) -> None:
    if child.exitcode is None:  # and so its number is still its own
        assert child.pid is not None
        # Unless the signal came in the moment in which its end is being noted.
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)


def refuse(error: Exception) -> int:
    """Says what is wrong with the settings; returns the exit code."""
    print(f"gateway: {error}", file=sys.stderr, flush=True)
    return _WRONG_SETTINGS


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)
