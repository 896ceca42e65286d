"""Virtual environments for clients whose requirements conflict with those of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_environment(folder: Path, requirements: Path) -> Path:
    """Create an environment and return its interpreter.

    uv uses a tenth of pip's CPU time. pip is the fallback if only pip has a registry configured.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    wanted = ["--requirement", str(requirements)]
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", str(python)]
    if subprocess.run([*uv, *wanted], capture_output=True, check=False).returncode:
        pip = [sys.executable, "-m", "pip", "--python", str(folder), "--disable-pip-version-check"]
        _run(*pip, "install", "--no-compile", *wanted)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
