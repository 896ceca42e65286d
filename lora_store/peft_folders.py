"""Folder in which one agent process stores adapter versions as PEFT files, for engines to read.

``<weights digest>/``     ``adapter_config.json`` and ``adapter_model.safetensors``, never changed
``.<digest>.<hex>.tmp/``  version that is being written, or was left by a killed process
``.<digest>.<hex>.gone/`` version that is being removed
``.lock``                 held (flock) by the agent process

The agent renames a version to its final name after all files are synced. To delete a version, the
agent first renames it to a temporary name. Engines therefore never find an incomplete version under
its final name, even if the agent was killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from adapters import peft
from adapters.record import is_digest
from lora_store.folder_lock import FolderLock

if TYPE_CHECKING:
    # Import only for type checking: this module imports numpy, which most processes do not need.
    from adapters.peft_files import PeftFiles

_FILES = (peft.CONFIG, peft.WEIGHTS)


class PeftFolders:
    """Folder with adapter versions. Methods block, and raise `OSError` if the disk fails."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._lock = FolderLock(root / ".lock")

    def take(self) -> bool:
        """Try to take the folder's lock. Return True if this process holds the lock now.

        After taking the lock, remove the temporary folders of processes that were killed.
        """
        if not self._lock.is_held:
            if not self._lock.take():
                return False
            self._sweep()
        return True

    def close(self) -> None:
        """Release the folder's lock, so that another process can write to the folder."""
        self._lock.release()

    def list_versions(self) -> dict[str, int]:
        """Return the size in bytes of every complete version, by digest."""
        found: dict[str, int] = {}
        for path in self._root.iterdir():
            if is_digest(path.name):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found[path.name] = sum((path / name).stat().st_size for name in _FILES)
        return found

    def has(self, digest: str) -> bool:
        return (self._root / digest).is_dir()

    def put(self, digest: str, files: PeftFiles) -> None:
        """Write an adapter version. Only the process that holds the folder's lock may call this.

        If writing fails, the incomplete files are removed.
        """
        temporary = self._temporary_path(digest, "tmp")
        temporary.mkdir()
        try:
            _write(temporary / peft.CONFIG, [files.config])
            _write(temporary / peft.WEIGHTS, files.weights())
            _sync(temporary)
            if self.has(digest):
                self.remove(digest)  # The existing folder is incomplete: a file is missing.
            temporary.rename(self._root / digest)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(self._root)

    def remove(self, digest: str) -> None:
        """Remove an adapter version if it exists. Only the holder of the lock may call this."""
        gone = self._temporary_path(digest, "gone")
        with contextlib.suppress(FileNotFoundError):
            (self._root / digest).rename(gone)
            shutil.rmtree(gone)

    def _sweep(self) -> None:
        for ending in ("tmp", "gone"):
            for path in self._root.glob(f".*.{ending}"):
                # Ignore errors: on NFS, a file that is still open leaves a .nfs file behind, so the
                # folder cannot be removed now. The next start removes it.
                shutil.rmtree(path, ignore_errors=True)

    def _temporary_path(self, digest: str, ending: str) -> Path:
        if not is_digest(digest):
            raise ValueError(f"{digest!r} is no digest")
        return self._root / f".{digest}.{secrets.token_hex(4)}.{ending}"


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
