"""Certificate files as they were when they could last be used, for libraries that take files alone.

Such a library reads its files with each connection, and knows no context that somebody else made.
So it is given files in memory. What is in those changes once new files have been found good, and
until then connections are made with the old ones. A certificate and its key are in one of them.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import NamedTuple

from certificates.contexts import ClientFiles
from certificates.reloading import ReloadedValue


class _MemoryFile:
    """A file in this process' memory, whose content is exchanged in one step."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("certificate")
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def write(self, content: bytes) -> None:
        new = os.memfd_create("certificate")
        try:
            with open(new, "wb", closefd=False) as file:
                file.write(content)
            os.dup2(new, self._descriptor, inheritable=False)
        finally:
            os.close(new)


class _Copies(NamedTuple):
    """Paths in memory, and what looks at the real files for as long as this process lives."""

    paths: ClientFiles
    watched: ReloadedValue[None]


_lock = threading.Lock()
_copies: dict[tuple[ClientFiles, str | None], _Copies] = {}


def copy_to_memory(name: str, files: ClientFiles, password: str | None = None) -> ClientFiles:
    """Return paths of files in memory in place of the given ones. Never closed.

    Args:
        name: what the files are for, in the log.
        files: files that may be renewed; those that are None stay None.
        password: the password of the key.

    Raises OSError for files that cannot be used.
    """
    with _lock:
        if (files, password) not in _copies:
            # Apart, a connection that is made between two exchanges would get another's key.
            ca, pair = _MemoryFile(), _MemoryFile()
            watched = ReloadedValue(name, files.paths, partial(_copy, files, password, ca, pair))
            memory = (ca.path, pair.path, pair.path)
            paths = ClientFiles(*(path and kept for path, kept in zip(files, memory, strict=True)))
            _copies[files, password] = _Copies(paths, watched)
        return _copies[files, password].paths


def _copy(files: ClientFiles, password: str | None, ca: _MemoryFile, pair: _MemoryFile) -> None:
    """Raises OSError for files that cannot be used, and where they change meanwhile."""
    _, (of_ca, *of_pair) = files.load(password)
    ca.write(of_ca or b"")
    pair.write(b"\n".join(filter(None, of_pair)))
