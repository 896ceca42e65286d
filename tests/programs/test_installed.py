"""Installations that fail or are skipped with a reason, and never hang."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.programs import installed
from tests.programs.engine.script import Script
from tests.programs.npm import NpmProgram
from tests.programs.program import Program, Workspace
from tests.programs.programs import PROGRAMS
from tests.programs.registry_client import run_client
from tests.support.gateway_process import PATIENCE_S

_UNREACHABLE = "the npm registry cannot be reached"


class _Package(Program):
    """A program whose registry answers `answers` times and then fails."""

    name = "package"
    registry = "npm"
    packages = ("zod",)
    well_known = "ms"

    def __init__(self, answers: int, *command: str) -> None:
        self._answers = answers
        self._command = command

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        run_client(self._command, folder=folder)

    def newest_version(self, package: str) -> str:
        self._answers -= 1
        return run_client(["true" if self._answers >= 0 else "false"])

    def prepare(self, workspace: Workspace) -> Script:
        raise AssertionError("not run")

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        raise AssertionError("not run")


@pytest.fixture(autouse=True)
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(installed, "BUILD", tmp_path)
    return tmp_path


@pytest.mark.parametrize("newest", [False, True], ids=["pinned", "newest"])
def test_a_registry_that_cannot_be_reached_is_the_reason(newest: bool) -> None:
    assert installed.install(_Package(0, "true"), newest=newest).missing == _UNREACHABLE


def test_a_registry_that_is_lost_on_the_way_is_the_reason() -> None:
    assert installed.install(_Package(1, "false"), newest=False).missing == _UNREACHABLE


def test_an_installation_that_fails_is_an_error_with_what_was_printed() -> None:
    package = _Package(2, "sh", "-c", "echo 'no such version' >&2; exit 1")
    with pytest.raises(SystemExit, match="no such version"):
        installed.install(package, newest=False)


def test_an_installed_program_needs_no_registry() -> None:
    first = installed.install(_Package(1, "true"), newest=False)
    assert first.missing is None
    again = installed.install(_Package(0, "false"), newest=False)
    assert (again.folder, again.missing) == (first.folder, None)


def test_a_missing_tool_is_the_reason() -> None:
    package = _Package(2, "true")
    package.tools = ("sh", "no-such-tool")
    assert installed.install(package, newest=False).missing == "needs no-such-tool"


@pytest.mark.skipif(not shutil.which("npm"), reason="needs npm")
def test_npm_does_not_answer_from_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an unreachable registry: nothing listens on the port."""
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:1")
    codex = PROGRAMS["codex"]
    assert isinstance(codex, NpmProgram)
    assert installed.install(codex, newest=False).missing == _UNREACHABLE


def test_a_command_is_killed_at_its_limit_with_its_children() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as ended:
        run_client(["sh", "-c", "sleep 1000 & echo $!; sleep 1000"], 0.5)
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(ended.value.stdout))
        assert child.status() == psutil.STATUS_ZOMBIE or child.wait(PATIENCE_S) is None


def test_what_a_command_printed_before_its_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(run_client, limit_s=0.5)
    monkeypatch.setattr(_Package, "install", lambda *_: run(["sh", "-c", "echo why; sleep 1000"]))
    with pytest.raises(SystemExit, match="why"):
        installed.install(_Package(2, "true"), newest=False)
