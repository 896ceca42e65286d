"""Virtual environments for clients whose requirements do not go with those of the tests."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder: Path, requirements: Path) -> Path:
    """Its interpreter. Packages of this environment that fit are seen there, and not installed."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "--disable-pip-version-check"]
    _run(*pip, "install", "--no-compile", "--requirement", str(requirements))
    return folder / "bin" / "python"


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
