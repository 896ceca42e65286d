"""Child processes of the local stack."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from ops.local_stack.process import Child

ENV = dict(os.environ)


def test_children_are_what_it_started_itself(tmp_path: Path) -> None:
    """Check that grandchildren are not listed, as when a model of Triton starts a process."""
    own = "sh -c 'sleep 600 & echo $! > theirs.new; mv theirs.new theirs; wait' &"
    script = f"cd {tmp_path}; sleep 600 & echo $! > other; {own} echo $! > new; mv new own; wait"
    child = Child("a (server)", ["sh", "-c", script], ENV, tmp_path / "log")
    child.start()
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in ("own", "theirs")):
            assert time.monotonic() < deadline, child.last_lines()
            time.sleep(0.01)
        own_pid = int((tmp_path / "own").read_text())
        while child.children("sh") != {own_pid}:  # a forked process first has its parent's name
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for name in ("theirs", "other"):
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
        while child.exit_status() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert child.children("sh") == set()
    finally:
        child.reap(grace=0)


@pytest.mark.parametrize("name", ["node (vitest 1)", "((sd-pam))", "a) b (c", "S 1 2"])
def test_processes_of_any_name_are_in_nobodys_way(tmp_path: Path, name: str) -> None:
    """Check names that are hard to parse in /proc, which has other users' processes too."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    (tmp_path / name).symlink_to(sleep)
    child = Child(
        "a server", ["sh", "-c", f"'{tmp_path}/{name}' 600 & wait"], ENV, tmp_path / "log"
    )
    child.start()
    try:
        deadline = time.monotonic() + 60
        while not child.children(name):
            assert time.monotonic() < deadline, child.last_lines()
            time.sleep(0.01)
        assert len(child.children(name)) == 1
    finally:
        child.reap(grace=0)
