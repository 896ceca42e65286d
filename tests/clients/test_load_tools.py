"""NVIDIA's public load tool against the real stack, unmodified, in its own environment."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments import make_environment
from tests.support.local_stack import Stack
from tests.support.triton_server import MODEL

REQUIREMENTS = Path(__file__).parent / "aiperf" / "requirements.txt"
# Too many tokens to have all arrived before the tool reads the first time.
REQUESTS, OUTPUT = 10, 200


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Path]:
    """Yield a temporary folder of 1 GB. It is removed, as pytest keeps folders of three runs."""
    folder = tmp_path / "venv"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_aiperf(stack: Stack, venv: Path, tmp_path: Path) -> None:
    python = make_environment(venv, REQUIREMENTS)
    load = {
        "--model": "demo",
        "--url": stack.gateway,
        "--endpoint-type": "chat",
        "--tokenizer": str(MODEL),
        "--concurrency": "2",
        "--request-count": str(REQUESTS),
        "--synthetic-input-tokens-mean": "30",
        "--output-tokens-mean": str(OUTPUT),
        "--extra-inputs": "ignore_eos:true",
        "--artifact-dir": str(tmp_path / "artifacts"),
        "--ui": "none",
    }
    options = [part for option in load.items() for part in option]
    done = subprocess.run(
        [python.with_name("aiperf"), "profile", "--streaming", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    [export] = (tmp_path / "artifacts").rglob("profile_export_aiperf.json")
    found = json.loads(export.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["time_to_first_token"]["avg"] > 0
    assert found["inter_token_latency"]["avg"] > 0
    # The value is the gateway's usage, not the tool's own count of the text.
    assert found["usage_completion_tokens"]["avg"] == OUTPUT
