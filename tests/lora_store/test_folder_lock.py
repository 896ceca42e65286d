"""The file lock of a folder: one holder at a time, and released when the holder's process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lora_store.folder_lock import FolderLock

HOLDER = """
import sys
from pathlib import Path
from lora_store.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
assert lock.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_one_at_a_time(tmp_path: Path) -> None:
    one, other = FolderLock(tmp_path / "lock"), FolderLock(tmp_path / "lock")
    assert not one.is_held
    assert one.take()
    assert one.take(), "who holds it goes on holding it"
    assert (other.take(), one.is_held, other.is_held) == (False, True, False)
    one.release()
    assert (other.take(), one.take(), one.is_held) == (True, False, False)
    other.release()


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "lock")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not lock.take()
        holder.kill()
    assert lock.take()
    lock.release()


def test_the_file_is_as_open_as_it_is_told(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "lock", mode=0o600)
    assert lock.take()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    lock.release()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "gone" / "lock")
    with pytest.raises(FileNotFoundError):
        lock.take()
    assert not lock.is_held
