"""Guides: their commands print what the guides show."""

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
    if rerun.NOT_DONE in done.stderr:  # a second attempt, four minutes later, may have passed
        with capsys.disabled():
            print(done.stderr)
    # stderr names each command as it runs. The last lines are of the failed one.
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
