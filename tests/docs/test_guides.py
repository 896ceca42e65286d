"""The guides' commands print what the guides show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs import generate, rerun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", rerun.GUIDES, ids=generate.name)
def test_a_guide_shows_what_its_commands_print(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.rerun", "--check", str(path)],
        cwd=generate.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if rerun.NOT_DONE in done.stderr:  # a second run may have passed, four minutes later
        with capsys.disabled():
            print(done.stderr)
    # Standard error names each command as it runs; the last lines are the one that failed.
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
