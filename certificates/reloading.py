"""Values that are made of certificate files, and made anew when the files have changed.

Files are looked at, not subscribed to: their status tells of a write in place, of a rename over
them, and of the symbolic link that Kubernetes exchanges when it renews a Secret.
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
"""Seconds between two polls of the files. Connections that begin meanwhile use the old ones."""

T = TypeVar("T")
_Stamp = tuple[object, ...]

_registry_lock = threading.Lock()
_registry: WeakSet[ReloadedValue[Any]] = WeakSet()


class ReloadedValue(Generic[T]):
    """A value made of files. It stays as it is until a new one could be made. For any thread.

    Ask for `value` with each connection: who keeps it misses the next one.
    """

    def __init__(self, name: str, files: Iterable[Path], make: Callable[[], T]) -> None:
        """Make the first value.

        Args:
            name: what the files are for, in the log.
            files: what `make` reads.
            make: raises OSError or ValueError for files that cannot be used, as this does then.
        """
        self._name = name
        self._files = tuple(files)
        self._make = make
        self._lock = threading.Lock()
        self._problem = ""
        # Before they are read: what is written in between is seen by the next look.
        self._tried = self._stamp()
        self._value = make()
        with _registry_lock:
            _registry.add(self)

    @property
    def value(self) -> T:
        return self._value

    def refresh(self, *, force: bool = False) -> None:
        """Make the value anew where the files have changed, or in any case with `force`."""
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
    """Have every value of this process look at its files. Blocks."""
    with _registry_lock:
        known = list(_registry)
    for each in known:
        each.refresh(force=force)


class CertificatePoller:
    """Looks at all files from time to time while it is open. Belongs to one event loop."""

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
        """Read all files, changed or not."""
        self._asked.set()

    async def _follow(self) -> None:
        while True:
            force = False
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    force = await self._asked.wait()
            self._asked.clear()
            if not _registry:
                continue  # no thread for a gateway without certificates
            try:
                await asyncio.to_thread(poll_all, force=force)
            except Exception:  # the next look may find better files
                log.exception("looking at certificate files failed")


def _status(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    # The time of a change of the inode tells of permissions that were mended, too.
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
