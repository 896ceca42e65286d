"""The newest Python SDKs, unmodified, against the real stack, in separate environments."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments import make_environment
from tests.support.local_stack import Stack

FILES = Path(__file__).parent / "sdks"
# No release of openai is compatible with the newest release of all SDKs.
SCRIPTS = {
    "openai2": ["with_instructor.py", "with_litellm.py", "with_llama_index.py"],
    "openai3": ["with_langchain_anthropic.py", "with_openai_agents.py", "with_pydantic_ai.py"],
}
OFFLINE = {
    # LiteLLM would download model prices from GitHub. The package includes some.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Path]:
    """Yield a large temporary folder. It is removed, as pytest keeps folders of three runs."""
    folder = tmp_path / "venv"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("environment", SCRIPTS)
def test_sdks(stack: Stack, venv: Path, environment: str) -> None:
    python = make_environment(venv, FILES / f"requirements-{environment}.txt")
    failed = [
        output for script in SCRIPTS[environment] if (output := _failure(python, script, stack))
    ]
    assert not failed, "\n\n".join(failed)


def _failure(python: Path, script: str, stack: Stack) -> str:
    """Return the output of a script if one of its checks has failed, else ""."""
    done = subprocess.run(
        [python, FILES / script],
        env=os.environ | OFFLINE | {"GATEWAY_BASE_URL": f"{stack.gateway}/v1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{script}\n{done.stdout}" if done.returncode else ""
