"""Worker processes that serve one port, and their parent process.

The parent binds the port, starts the workers, and forwards signals. A Python process uses one CPU
core, so there should be one worker for each core. Workers share the listening socket, but no
writable memory. An idle worker accepts connections sooner than a busy worker, and so gets more
connections.

Workers are forks of the parent, which has imported all modules and serves no requests. A fork
starts in a tenth of the time of a new interpreter. Memory pages are shared with the parent until a
process writes to them. The parent must have only one thread: a lock that another thread held during
the fork would stay locked in the worker.

See decision 045 in docs/decisions.
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

STOP_NOW_SIGNAL = signal.SIGUSR2
"""Signal from the parent that stops a worker at once, without waiting for running requests.

The signal also stops a worker that has not finished starting.
"""

_FORK = multiprocessing.get_context("fork")
_ENDED_BY = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.1
# Minimum seconds between two starts of the same worker. Without this pause, a worker that dies
# right after each start would fill the log.
_RESTART_PAUSE_S = 1.0
# Minimum seconds between two starts of a worker that ended because of wrong settings. The pause is
# longer, because the settings file is probably being edited.
_REFUSED_PAUSE_S = 5.0
# Exit code of a worker, and of the parent, for wrong settings.
_WRONG_SETTINGS = 2


@dataclass(frozen=True, slots=True)
class Worker:
    """Index of a worker process, and the resources that the worker gets from its parent.

    Attributes:
        index: the worker's number, from 0.
        count: the number of workers.
        listeners: the shared listening sockets. The first one is for clients. The second one is for
            admins, if they have a separate port.
        parent: the file descriptor of a pipe's read end. The write end closes when the parent ends.
        folder: the folder of the workers' Unix sockets `{index}.sock`. Each worker listens on its
            Unix socket for requests from the other workers.
    """

    index: int
    count: int
    listeners: tuple[socket.socket, ...]
    parent: int
    folder: Path

    def open_sockets(self) -> list[socket.socket]:
        """Bind the worker's Unix socket. Return the shared sockets, followed by the Unix socket."""
        own = socket.socket(socket.AF_UNIX)
        self.get_socket_path(self.index).unlink(missing_ok=True)
        own.bind(str(self.get_socket_path(self.index)))
        return [*self.listeners, own]

    @property
    def siblings(self) -> list[Path]:
        """Paths of the other workers' Unix sockets."""
        return [self.get_socket_path(index) for index in range(self.count) if index != self.index]

    def get_socket_path(self, index: int) -> Path:
        return self.folder / f"{index}.sock"

    def clean_up(self) -> None:
        """Remove the worker's Unix socket. Remove the folder if all other sockets are gone, too.

        A worker calls this before it exits if its parent has died.
        """
        self.get_socket_path(self.index).unlink(missing_ok=True)
        if not any(sibling.exists() for sibling in self.siblings):
            shutil.rmtree(self.folder, ignore_errors=True)


class Workers:
    """Parent that starts, restarts and stops workers.

    `run` must be called in the main thread of a process without other threads.

    Args:
        count: the number of workers.
        listeners: the bound sockets that all workers listen on.
        folder: a folder for the workers' Unix sockets.
        work: the function that runs in each worker and returns the worker's exit code.
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
        """Run workers until SIGTERM or SIGINT, wait for their end, and return the exit code.

        A worker that ends earlier is replaced. SIGHUP is forwarded to each worker. A second SIGTERM
        or SIGINT is forwarded as `STOP_NOW_SIGNAL`, not as SIGTERM. A worker that has not handled
        the first SIGTERM yet would not notice another SIGTERM.
        """
        with _open_pipe() as (read, self._write):
            for number in (*_ENDED_BY, signal.SIGHUP):
                signal.signal(number, self._pass_on)
            workers = [
                Worker(index, self._count, self._listeners, read, self._folder)
                for index in range(self._count)
            ]
            # Exclude all existing objects from garbage collection. The collector then does not
            # write to their memory pages, so the workers continue to share these pages.
            gc.collect()
            gc.freeze()
            for worker in workers:
                self._start(worker)
            while self._children:
                time.sleep(_POLL_S)
                if self._ending:
                    # Close the listening sockets in the parent, too. While any process has them
                    # open, the kernel accepts connections, which would never be served.
                    for listener in self._listeners:
                        listener.close()
                for worker in workers:
                    self._check_worker(worker)
        return self._code

    def _start(self, worker: Worker) -> None:
        # Block signals during the fork, so that the child never runs the parent's signal handlers.
        # In the child, SIGHUP stays blocked until the worker installs its own handler.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDED_BY, signal.SIGHUP})
        try:
            child = _FORK.Process(target=self._begin, args=(worker,))
            child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._children[worker.index] = child
        self._started[worker.index] = time.monotonic()
        if self._ending:  # the signal came before `_children` had this child
            _send(child, signal.SIGTERM)

    def _begin(self, worker: Worker) -> NoReturn:
        """Run `work` in the forked child, and exit with the returned code."""
        # Move the child to a new process group. Ctrl-C in a terminal then sends SIGINT only to the
        # parent, which forwards it.
        os.setpgid(0, 0)
        os.close(self._write)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDED_BY)
        raise SystemExit(self._work(worker))

    def _check_worker(self, worker: Worker) -> None:
        child = self._children.get(worker.index)
        if child is None or (code := child.exitcode) is None:
            return
        refused = code == _WRONG_SETTINGS
        # Stop the parent with an error only if no other worker runs. Running workers have started
        # with valid settings. An operator may be editing the settings now, and may fix them.
        serving = any(other.exitcode is None for other in self._children.values())
        if refused and not serving and not self._ending:
            self._code = code
            self._pass_on(signal.SIGTERM, None)
        pause = _REFUSED_PAUSE_S if refused else _RESTART_PAUSE_S
        if self._ending:
            del self._children[worker.index]
        elif time.monotonic() - self._started[worker.index] > pause:
            print(
                f"gateway: worker {worker.index} ended with {code}; starting another",
                file=sys.stderr,
                flush=True,
            )
            self._start(worker)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            number = STOP_NOW_SIGNAL if self._ending else signal.SIGTERM
            self._ending = True
        for child in self._children.values():
            _send(child, number)


def _send(child: BaseProcess, number: int) -> None:
    if child.exitcode is None:  # not reaped yet, so no other process can have its id
        assert child.pid is not None
        # Ignore the error: the child may end between the check and the signal.
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)


def report_bad_settings(error: Exception) -> int:
    """Print `error`, which describes wrong settings. Return the exit code of the process."""
    print(f"gateway: {error}", file=sys.stderr, flush=True)
    return _WRONG_SETTINGS


@contextmanager
def _open_pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)
