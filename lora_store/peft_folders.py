"""Adapter versions as folders that an engine reads: one folder, of one keeper at a time.

``<weights digest>/``     ``adapter_config.json`` and ``adapter_model.safetensors``, never changed
``.<digest>.<hex>.tmp/``  one being written, or what a killed process left of it
``.<digest>.<hex>.gone/`` one being removed
``.lock``                 held (flock) by the process that writes and removes

A version appears by rename after all of it is on the disk, and goes by rename before any of it is
deleted. So whoever reads finds it whole or not at all, wherever the keeper was killed.
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
    # It needs numpy, and who only looks at folders does without.
    from adapters.peft_files import PeftFiles

_FILES = (peft.CONFIG, peft.WEIGHTS)


class PeftFolders:
    """All methods block. Raises `OSError` as it comes."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._lock = FolderLock(root / ".lock")

    def take(self) -> bool:
        """Whether this process is the keeper, from now on. What others left unfinished is swept."""
        if not self._lock.held:
            if not self._lock.take():
                return False
            self._sweep()
        return True

    def close(self) -> None:
        """Lets another process be the keeper."""
        self._lock.let_go()

    def held(self) -> dict[str, int]:
        """Every whole version here, with its bytes."""
        found: dict[str, int] = {}
        for path in self._root.iterdir():
            if is_digest(path.name):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    found[path.name] = sum((path / name).stat().st_size for name in _FILES)
        return found

    def has(self, digest: str) -> bool:
        return (self._root / digest).is_dir()

    def put(self, digest: str, files: PeftFiles) -> None:
        """For the keeper. What raises here has left nothing."""
        temporary = self._aside(digest, "tmp")
        temporary.mkdir()
        try:
            _write(temporary / peft.CONFIG, [files.config])
            _write(temporary / peft.WEIGHTS, files.weights())
            _sync(temporary)
            if self.has(digest):
                self.remove(digest)  # one that somebody has taken a file from
            temporary.rename(self._root / digest)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync(self._root)

    def remove(self, digest: str) -> None:
        """For the keeper."""
        gone = self._aside(digest, "gone")
        with contextlib.suppress(FileNotFoundError):
            (self._root / digest).rename(gone)
            shutil.rmtree(gone)

    def _sweep(self) -> None:
        for ending in ("tmp", "gone"):
            for path in self._root.glob(f".*.{ending}"):
                # On NFS what is still open leaves a name behind: the next start finds it.
                shutil.rmtree(path, ignore_errors=True)

    def _aside(self, digest: str, ending: str) -> Path:
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
