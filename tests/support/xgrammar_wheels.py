"""Releases of xgrammar, installed once from the package registry into build/xgrammar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_TVM = ("apache-tvm-ffi==0.1.12", "typing-extensions")
RELEASES = {"0.1.13": (), "0.1.18": (), "0.1.25": (), "0.1.32": _TVM, "0.2.8": _TVM}
"""Additional requirements by release."""
ROOT = Path(__file__).parents[2]


def install_release(release: str) -> Path:
    """Return the folder of a release's wheel. Skip the test if the registry cannot be reached."""
    return _install(f"xgrammar=={release}", release, RELEASES[release])


def install_vocabulary() -> Path:
    """Return the vocabulary file that `tests.support.xgrammar_worker` reads."""
    folder = _install("mistral-common==1.13.1", "mistral-common-1.13.1")
    return folder / "mistral_common" / "data" / "tekken_240718.json"


def compile_guides(
    folder: Path, guides: Sequence[tuple[str, str]], vocabulary: Sequence[str] = ()
) -> list[tuple[str | None, float]]:
    """Return for each guide the release's error, or None, and the CPU time in seconds.

    `vocabulary` are the vocabulary arguments of `tests.support.xgrammar_worker`.
    """
    return [(why, seconds) for why, seconds, _ in _run_worker(folder, guides, vocabulary)]


def match_answers(folder: Path, guides: Sequence[tuple[str, str, list[str]]]) -> list[list[bool]]:
    """Return for each guide whether it accepts each of its answers."""
    return [accepted for _, _, accepted in _run_worker(folder, guides)]


def _run_worker(
    folder: Path, guides: Sequence[Sequence[Any]], vocabulary: Sequence[str] = ()
) -> list[tuple[str | None, float, list[bool]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.xgrammar_worker", str(folder), *vocabulary],
        input="".join(f"{json.dumps(guide)}\n" for guide in guides),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def _install(package: str, name: str, others: Sequence[str] = ()) -> Path:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = ROOT / "build" / "xgrammar" / f"{name}-python{python}"
    if found.is_dir():
        return found
    part = found.with_name(f"{found.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries=1"]
    command += ["--no-compile", f"--target={part}", package, *others]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{package} cannot be installed: {done.stderr.strip()[-200:]}")
    try:
        part.rename(found)
    except OSError:  # another test was faster
        if not found.is_dir():
            raise
    return found
