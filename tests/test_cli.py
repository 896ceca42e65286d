"""The `gateway` command line, as far as it can be seen without a stack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if "GATEWAY_" not in name}
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=settings | variables,
        timeout=60,
    )


def test_help_names_the_commands() -> None:
    answer = _run("--help")
    assert answer.returncode == 0
    assert "up" in answer.stdout.split()
    assert "serve" in answer.stdout.split()


def test_the_command_line_imports_nothing_heavy() -> None:
    answer = _run("up", "--help", PYTHONPROFILEIMPORTTIME="1")
    modules = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "gateway.cli" in modules
    assert not modules & {"numpy", "fastapi", "transformers", "grpc", "pydantic", "uvicorn"}


@pytest.mark.parametrize("arguments", [[], ["down"], ["up", "--stat", "x"], ["up", "--port", "x"]])
def test_wrong_command_lines(arguments: list[str]) -> None:
    answer = _run(*arguments)
    assert answer.returncode == 2
    assert "error: " in answer.stderr


def test_serve_names_the_variables_that_are_wrong() -> None:
    answer = _run("serve", GATEWAY_PORT="http")
    assert answer.returncode == 2
    assert "GATEWAY_TOKENIZER_DIR: Field required" in answer.stderr
    assert "GATEWAY_PORT: Input should be a valid integer" in answer.stderr


def test_serve_says_why_it_does_not_start(tmp_path: Path) -> None:
    answer = _run("serve", GATEWAY_TOKENIZER_DIR=str(tmp_path / "nowhere"))
    assert answer.returncode != 0
    assert "nowhere" in answer.stderr
