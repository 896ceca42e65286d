"""Values that are built from certificate files and rebuilt when the files change.

Files are polled by `os.stat`, not watched. The status shows a write in place, a file renamed over
the old one, and the symbolic link that Kubernetes replaces when it renews a Secret.

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
"""Seconds between two polls of the files. New connections use the old files until the next poll."""

T = TypeVar("T")
_Stamp = tuple[object, ...]

_registry_lock = threading.Lock()
_registry: WeakSet[ReloadedValue[Any]] = WeakSet()


class ReloadedValue(Generic[T]):
    """A value built from files. The old value is retained until a new one was built successfully.
    Thread-safe.

    Read `value` for each connection; a stored copy misses later reloads.
    """

    def __init__(self, name: str, files: Iterable[Path], make: Callable[[], T]) -> None:
        """Build the first value.

        Args:
            name: purpose of the files, for the log.
            files: the files that `make` reads.
            make: builds the value; raises OSError or ValueError if the files cannot be used. Errors
                of this first call are passed on.
        """
        self._name = name
        self._files = tuple(files)
        self._make = make
        self._lock = threading.Lock()
        self._problem = ""
        # Take the files' status before they are read, so that the next poll notices a write during
        # the read.
        self._tried = self._stamp()
        self._value = make()
        with _registry_lock:
            _registry.add(self)

    @property
    def value(self) -> T:
        return self._value

    def refresh(self, *, force: bool = False) -> None:
        """Rebuild the value if the files have changed since the last attempt, or always with
        `force`.
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
    """Refresh every `ReloadedValue` of this process. This blocks while files are read."""
    with _registry_lock:
        known = list(_registry)
    for each in known:
        each.refresh(force=force)


class CertificatePoller:
    """Async context manager that polls the files of all values while it is open.

    It must be used on one event loop.
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
        """Read all files again soon, even if they have not changed. Return without waiting."""
        self._asked.set()

    async def _follow(self) -> None:
        while True:
            force = False
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    force = await self._asked.wait()
            self._asked.clear()
            if not _registry:
                continue  # a gateway without certificate files starts no thread
            try:
                await asyncio.to_thread(poll_all, force=force)
            except Exception:  # continue: the next poll may succeed
                log.exception("looking at certificate files failed")


def _status(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    # Include the inode's change time, which also changes when an operator corrects permissions.
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
