"""Programs that README and docs/ list as supported, from npm, against the real stack."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")),
    reason="the programs need node and npm, which are not installed",
)
def test_codex_and_claude_code() -> None:
    """`make test-programs` runs the other programs, with a model that writes calls as JSON.

    The test is skipped if no program failed and one could not be installed here.
    """
    programs = ["--form", "qwen3_coder", "codex", "claude-code"]
    command = [sys.executable, "-m", "tests.programs", *programs]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    if missing := re.findall(r"^.* not run: .*$", done.stdout, re.M):
        pytest.skip("; ".join(" ".join(line.split()) for line in missing))
    assert done.stdout.count(" passed") == 2, done.stdout
