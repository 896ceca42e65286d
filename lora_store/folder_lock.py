"""Lock file with which one process of a machine gets exclusive use of a folder.

The kernel releases the lock when the process ends, even if it is killed. The file remains.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderLock:
    """Exclusive lock on a file. A new object does not hold the lock yet.

    `take` raises `OSError` if the file cannot be opened or locked.
    """

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        """Use the lock file `path`, which is created by `take` if it does not exist.

        `mode` is the permission mode of a new file. Each user who may open the file may lock it.
        """
        self._path = path
        self._mode = mode
        self._file = -1

    @property
    def is_held(self) -> bool:
        """True if this process holds the lock."""
        return self._file >= 0

    def take(self) -> bool:
        """Try to take the lock without waiting. Return True if this process holds it now."""
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
        """Release the lock. Do nothing if this process does not hold the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
