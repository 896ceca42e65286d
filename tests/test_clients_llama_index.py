"""LlamaIndex against the real stack, in an environment of its own: see its requirements.txt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local_stack import Stack

FILES = Path(__file__).parent / "llama_index"


def _run(*command: str, **environment: str) -> None:
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_llama_index(stack: Stack, tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path))
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path), "--disable-pip-version-check"]
    _run(*pip, "install", "--no-compile", "--requirement", str(FILES / "requirements.txt"))
    base_url = f"{stack.gateway}/v1"
    python = str(tmp_path / "bin" / "python")
    _run(python, str(FILES / "clients.py"), GATEWAY_BASE_URL=base_url)
