"""A disk whose writes fail: no half transaction, no lost commit, and no restart is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.gateway.database.failing_disk import EMPTY, FROM_THEN_ON, ONCE, WITH_LOG
from tests.support.local_stack import SHARED_MEMORY
from tests.support.patience import PATIENCE_S

_SOURCE = Path(__file__).with_name("failing_disk.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc to compile failing_disk.c with")
    library = tmp_path_factory.mktemp("disk") / "failing_disk.so"
    options = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *options, "-o", library, _SOURCE, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("failures", [ONCE, FROM_THEN_ON])
@pytest.mark.parametrize("start", [EMPTY, WITH_LOG])
def test_each_write_fails(library: Path, start: str, failures: str) -> None:
    """Run `failing_disk.py`, which checks the database after each failure."""
    command = [sys.executable, "-m", "tests.gateway.database.failing_disk"]
    # In memory: hundreds of databases are synchronized some 20 times each.
    memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="disk-", dir=memory) as folder:
        ended = subprocess.run(
            [*command, folder, start, failures],
            env=os.environ | {"LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    phases = {"open", "write", "checkpoint", "close"}
    assert counts.keys() == phases, counts
    assert all(counts[phase] >= 3 for phase in phases), counts
