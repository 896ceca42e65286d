"""Copies in memory of the last valid certificate files, for libraries that accept only paths.

Some libraries accept no TLS context, only paths, and read the files for each connection. They could
read a file while it is being replaced. `copy_to_memory` therefore returns the paths of in-memory
copies. The copies are updated only after the new files were found valid. A certificate and its key
are in one in-memory file, so both are replaced at the same time.
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
    """A file in this process' memory. Its contents are replaced atomically."""

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
    """Paths of the in-memory copies, and the `ReloadedValue` that updates them.

    The `ReloadedValue` is stored here because only referenced values are polled.
    """

    paths: ClientFiles
    watched: ReloadedValue[None]


_lock = threading.Lock()
_copies: dict[tuple[ClientFiles, str | None], _Copies] = {}


def copy_to_memory(name: str, files: ClientFiles, password: str | None = None) -> ClientFiles:
    """Return the paths of in-memory copies of the given files.

    The copies are updated when the given files change. They exist until the process ends.

    Args:
        name: purpose of the files, for the log.
        files: the files to copy. Paths that are None stay None.
        password: the password of the key, None for a key that is not encrypted.

    Raise OSError for files that cannot be used.
    """
    with _lock:
        if (files, password) not in _copies:
            # Write certificate and key to one file. With two files, a connection between the two
            # writes could read a certificate and a key that do not match.
            ca, pair = _MemoryFile(), _MemoryFile()
            watched = ReloadedValue(name, files.paths, partial(_copy, files, password, ca, pair))
            memory = (ca.path, pair.path, pair.path)
            paths = ClientFiles(*(path and kept for path, kept in zip(files, memory, strict=True)))
            _copies[files, password] = _Copies(paths, watched)
        return _copies[files, password].paths


def _copy(files: ClientFiles, password: str | None, ca: _MemoryFile, pair: _MemoryFile) -> None:
    """Copy the files to memory.

    Raise OSError for files that cannot be used, or that change during the copy.
    """
    _, (of_ca, *of_pair) = files.load(password)
    ca.write(of_ca or b"")
    pair.write(b"\n".join(filter(None, of_pair)))
