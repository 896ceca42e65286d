"""Which one process of a machine works in a folder: a file there that it holds locked.

The lock ends with the process, however it ends, and the file stays.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderLock:
    """Not held at first. Raises `OSError` as it comes."""

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        """`mode` is the file's: whoever may open it may hold it."""
        self._path = path
        self._mode = mode
        self._file = -1

    @property
    def held(self) -> bool:
        return self._file >= 0

    def take(self) -> bool:
        """Whether this process holds it, from now on."""
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

    def let_go(self) -> None:
        """For another process to take."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
