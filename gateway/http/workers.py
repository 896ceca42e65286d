"""Several processes on one port: a parent that binds, starts workers, and passes signals on.

Python runs one core, so a machine with more has a worker for each. They share the listening socket
(whoever is idle accepts, so a busy worker gets fewer new connections) and nothing else in memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_VARIABLE = "GATEWAY_WORKER"
_POLL_S = 0.1
# A worker that dies at once again must not become a loop that fills the log.
_RESTART_PAUSE_S = 1.0
# Nor one whose settings are wrong: somebody is likely to be writing the file at this moment.
_REFUSED_PAUSE_S = 5.0
WRONG_SETTINGS = 2
"""The exit code of a process whose settings are wrong."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker is given by its parent.

    Attributes:
        index: its number, from 0.
        count: how many there are.
        listeners: the descriptors of the shared listening sockets: for clients, then for admins
            where they have a port of their own.
        parent: the descriptor of a pipe that ends when the parent does.
        folder: where each worker listens on a socket of its own, `{index}.sock`, for the others.
    """

    index: int
    count: int
    listeners: tuple[int, ...]
    parent: int
    folder: Path

    @classmethod
    def from_environment(cls) -> Worker | None:
        """None for a process that is no worker."""
        text = os.environ.get(_VARIABLE)
        if text is None:
            return None
        index, count, listeners, parent, folder = text.split(",", 4)
        descriptors = tuple(int(number) for number in listeners.split("+"))
        return cls(int(index), int(count), descriptors, int(parent), Path(folder))

    def variable(self) -> dict[str, str]:
        """The environment that `from_environment` reads."""
        listeners = "+".join(map(str, self.listeners))
        return {
            _VARIABLE: f"{self.index},{self.count},{listeners},{self.parent},{self.folder}",
        }

    def sockets(self) -> list[socket.socket]:
        """What to listen on: the shared sockets and the worker's own."""
        own = socket.socket(socket.AF_UNIX)
        self.socket_of(self.index).unlink(missing_ok=True)
        own.bind(str(self.socket_of(self.index)))
        return [*(socket.socket(fileno=descriptor) for descriptor in self.listeners), own]

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

    `folder` is one that nobody else uses, and that the workers share.
    """

    def __init__(self, count: int, listeners: Sequence[socket.socket], folder: Path) -> None:
        self._count = count
        self._folder = folder
        self._listeners = listeners
        for listener in listeners:
            listener.set_inheritable(True)
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, float] = {}
        self._ending = False
        self._code = 0

    def run(self) -> int:
        """Blocks until SIGTERM or SIGINT and the end of all workers; returns the exit code.

        SIGHUP goes to each worker; a second SIGTERM goes to them too, and ends them at once.
        """
        with _pipe() as (read, _):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._pass_on)
            descriptors = tuple(listener.fileno() for listener in self._listeners)
            places = [
                Worker(index, self._count, descriptors, read, self._folder)
                for index in range(self._count)
            ]
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
        command = [sys.executable, "-m", "gateway"]
        # The worker inherits that SIGHUP waits. It would end one that has no handler for it yet.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            self._children[place.index] = subprocess.Popen(
                command,
                env=os.environ | place.variable(),
                pass_fds=(*place.listeners, place.parent),
                # A terminal's Ctrl-C is for the parent, which passes it on.
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._started[place.index] = time.monotonic()
        if self._ending:  # told so while it was being started
            self._children[place.index].send_signal(signal.SIGTERM)

    def _look_after(self, place: Worker) -> None:
        child = self._children.get(place.index)
        if child is None or child.poll() is None:
            return
        refused = child.returncode == WRONG_SETTINGS
        # While others serve, what is wrong has become so after their start: it may be mended.
        serving = any(other.poll() is None for other in self._children.values())
        if refused and not serving and not self._ending:
            self._code = child.returncode
            self._pass_on(signal.SIGTERM, None)
        pause = _REFUSED_PAUSE_S if refused else _RESTART_PAUSE_S
        if self._ending:
            del self._children[place.index]
        elif time.monotonic() - self._started[place.index] > pause:
            print(
                f"gateway: worker {place.index} ended with {child.returncode}; starting another",
                file=sys.stderr,
                flush=True,
            )
            self._start(place)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            number, self._ending = signal.SIGTERM, True
        for child in self._children.values():
            if child.poll() is None:
                child.send_signal(number)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)
