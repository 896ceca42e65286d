"""The OpenAI tests of the public door, through the text models as far as they go."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = ("system/test_chat.py", "clients/test_openai.py", "system/test_parameters.py")
COUNTED = ("passed", "skipped")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ensemble", "bls"])
def test_the_openai_tests_through(mode: str) -> None:
    files = [str(TESTS / name) for name in FILES]
    # Its cache is that of the run around it.
    options = ["-q", "-p", "no:cacheprovider", f"--triton-mode={mode}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=TESTS.parent,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    summary = run.stdout.strip().splitlines()[-1]
    passed, skipped = (int(re.findall(rf"(\d+) {word}", summary)[0]) for word in COUNTED)
    # Most of it has to go through, or this shows nothing.
    assert passed > 2 * skipped, summary
