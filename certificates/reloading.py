"""Values that are built from certificate files, and rebuilt when the files change.

The files are polled with `os.stat`. The status of a file changes if the file is modified, if
another file is renamed to its path, or if Kubernetes replaces a symbolic link to renew a Secret.

See decision 082 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from weakref import WeakSet

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
"""Seconds between two polls. New connections use the old files until the next poll."""

T = TypeVar("T")
_Stamp = tuple[object, ...]

_registry_lock = threading.Lock()
_registry: WeakSet[ReloadedValue[Any]] = WeakSet()


class ReloadedValue(Generic[T]):
    """A value that is built from files. Thread-safe.

    The old value stays in use until a new value was built successfully. Read `value` for each
    connection, because a stored copy would miss later reloads.
    """

    def __init__(self, name: str, files: Iterable[Path], make: Callable[[], T]) -> None:
        """Build the first value.

        Args:
            name: purpose of the files, for the log.
            files: the files that `make` reads.
            make: builds the value, and raises OSError or ValueError if the files cannot be used. An
                error of the first call is passed on.
        """
        self._name = name
        self._files = tuple(files)
        self._make = make
        self._lock = threading.Lock()
        self._problem = ""
        # Read the files' status before their contents: the next poll then notices a write during
        # the read.
        self._tried = self._stamp()
        self._value = make()
        with _registry_lock:
            _registry.add(self)

    @property
    def value(self) -> T:
        return self._value

    def refresh(self, *, force: bool = False) -> None:
        """Rebuild the value if the files have changed since the last attempt.

        If `force` is True, rebuild it in any case.
        """
        with self._lock:
            stamp = self._stamp()
            if stamp == self._tried and not force:
                return
            self._tried = stamp
            try:
                value = self._make()
            except (OSError, ValueError) as error:
                if force or str(error) != self._problem:
                    self._problem = str(error)
                    log.error(
                        "%s: the files have changed and cannot be used: %s; what was read before "
                        "stays in force; mend the files, which are read again when they change "
                        "and on SIGHUP",
                        *(self._name, error),
                    )
                return
            self._value, self._problem = value, ""
            log.info("%s: read again, for new connections", self._name)

    def _stamp(self) -> _Stamp:
        return tuple(map(_status, self._files))


def poll_all(*, force: bool = False) -> None:
    """Refresh every `ReloadedValue` in this process. The call blocks while files are read."""
    with _registry_lock:
        known = list(_registry)
    for each in known:
        each.refresh(force=force)


class CertificatePoller:
    """Async context manager that polls the files of all values while the context is open.

    It must be used on a single event loop.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._work = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    def read_now(self) -> None:
        """Request that all files are read again soon, even if they have not changed.

        The call returns at once. Call this method in the thread of the event loop.
        """
        self._asked.set()

    async def _follow(self) -> None:
        while True:
            force = False
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    force = await self._asked.wait()
            self._asked.clear()
            if not _registry:
                continue  # start no thread, because this gateway has no certificate files
            try:
                await asyncio.to_thread(poll_all, force=force)
            except Exception:  # continue: the next poll may succeed
                log.exception("looking at certificate files failed")


def _status(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    # Include the time of the inode's last change, because it also changes with the permissions.
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
