"""LlamaIndex against the real stack, in an environment of its own: see its requirements.txt."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.environments import make_environment
from tests.support.local_stack import Stack

FILES = Path(__file__).parent / "llama_index"


@pytest.mark.slow
def test_llama_index(stack: Stack, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv", FILES / "requirements.txt")
    done = subprocess.run(
        [python, FILES / "clients.py"],
        env=os.environ | {"GATEWAY_BASE_URL": f"{stack.gateway}/v1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
