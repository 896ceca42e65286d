"""Copies in memory of the last usable certificate files, for libraries that only take paths.

Such a library reads its files with each connection and accepts no ready-made context. It is given
files in memory instead, whose content is replaced only after new files were found valid. A
certificate and its key share one file, so they are replaced together.
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
    """A file in this process' memory, whose content is replaced in one step."""

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
    """Paths in memory, and the value that polls the real files for the life of the process."""

    paths: ClientFiles
    watched: ReloadedValue[None]


_lock = threading.Lock()
_copies: dict[tuple[ClientFiles, str | None], _Copies] = {}


def copy_to_memory(name: str, files: ClientFiles, password: str | None = None) -> ClientFiles:
    """Return paths of in-memory copies of the given files. The copies are never closed.

    Args:
        name: purpose of the files, for the log.
        files: files that may be renewed; those that are None stay None.
        password: the password of the key.
    Raises OSError for files that cannot be used.
    """
    with _lock:
        if (files, password) not in _copies:
            # Certificate and key share one file: a connection between two writes would get another
            # pair's key.
            ca, pair = _MemoryFile(), _MemoryFile()
            watched = ReloadedValue(name, files.paths, partial(_copy, files, password, ca, pair))
            memory = (ca.path, pair.path, pair.path)
            paths = ClientFiles(*(path and kept for path, kept in zip(files, memory, strict=True)))
            _copies[files, password] = _Copies(paths, watched)
        return _copies[files, password].paths


def _copy(files: ClientFiles, password: str | None, ca: _MemoryFile, pair: _MemoryFile) -> None:
    """Copy the files. Raises OSError for files that cannot be used or change during the copy."""
    _, (of_ca, *of_pair) = files.load(password)
    ca.write(of_ca or b"")
    pair.write(b"\n".join(filter(None, of_pair)))
