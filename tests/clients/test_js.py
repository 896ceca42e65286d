"""The JavaScript clients against the real stack."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.local_stack import Stack

FILES = Path(__file__).parent / "js"


def _run(folder: Path, *command: str, **environment: str) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")),
    reason="the JavaScript clients need node and npm, which are not installed",
)
def test_openai_and_the_vercel_ai_sdk(stack: Stack, tmp_path: Path) -> None:
    for name in ("package.json", "package-lock.json", "clients.mjs"):
        shutil.copy(FILES / name, tmp_path)
    _run(tmp_path, "npm", "ci", "--no-audit", "--no-fund")
    _run(tmp_path, "node", "clients.mjs", GATEWAY_BASE_URL=f"{stack.gateway}/v1")
