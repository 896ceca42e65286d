"""A lock file that lets one process of a machine work in a folder.

The lock ends with the process, however it ends, and the file remains.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderLock:
    """A lock that is not held at first. Methods raise `OSError`."""

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        """Use the file `path`. `mode` is the mode of a new file: any user who may open it may lock
        it.
        """
        self._path = path
        self._mode = mode
        self._file = -1

    @property
    def is_held(self) -> bool:
        """True if this process holds the lock."""
        return self._file >= 0

    def take(self) -> bool:
        """Try to take the lock. Return True if this process holds it now."""
        if self._file < 0:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, self._mode)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(file)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self._file = file
        return True

    def release(self) -> None:
        """Release the lock for other processes."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
