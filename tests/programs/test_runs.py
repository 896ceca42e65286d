"""The verdicts of `make test-programs`: broken runs must fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.programs.engine.script import Script
from tests.programs.engine.stack import ScriptedStack, scripted_stack
from tests.programs.program import Program, Workspace, run_program
from tests.support.patience import PATIENCE_S

_CHAT = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url + "/v1/chat/completions", body.encode())
try:
    print(urllib.request.urlopen(request).read().decode())
except urllib.error.HTTPError as error:
    print(error)
"""
_BODY = '{"model": "demo", "messages": [{"role": "user", "content": "word-00000001"}]%s}'


class _Shell(Program):
    name = "shell"

    def __init__(self, *command: str) -> None:
        self._command = command

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        raise AssertionError("nothing to install")

    def newest_version(self, package: str) -> str:
        raise AssertionError("no registry")

    def prepare(self, workspace: Workspace) -> Script:
        return Script(calls=[], answer="The notes say: {found}.")

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [word.replace("URL", workspace.url) for word in self._command]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedStack]:
    with scripted_stack(tmp_path_factory.mktemp("programs")) as stack:
        yield stack


@pytest.mark.parametrize(
    ("command", "problems"),
    [
        (("echo", "The notes say: ."), []),
        ((sys.executable, "-c", _CHAT, "URL", _BODY % ""), []),
        (("echo", "The notes say nothing."), ["not in the output: The notes say: ."]),
        (("sh", "-c", "echo 'The notes say: .'; exit 3"), ["exit code 3"]),
        (
            (sys.executable, "-c", _CHAT + "print('The notes say: .')", "URL", _BODY % ', "n": 0'),
            ["1 x 400"],
        ),
    ],
    ids=["passes", "asks", "says nothing", "fails", "recovers from a refusal"],
)
def test_a_run(
    stack: ScriptedStack, tmp_path: Path, command: tuple[str, ...], problems: list[str]
) -> None:
    result = run_program(_Shell(*command), stack, tmp_path, tmp_path / "run")
    assert result.problems == problems, result.output
    sent = [each.request.path for each in result.exchanges]
    assert sent == ["/v1/chat/completions"] * ("URL" in command)


def test_what_a_program_leaves_behind_is_killed(stack: ScriptedStack, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    left = f"sleep 1000 & echo $! > {pid}; echo 'The notes say: .'"
    result = run_program(_Shell("sh", "-c", left), stack, tmp_path, tmp_path / "run")
    assert not result.problems
    deadline = time.monotonic() + PATIENCE_S
    while _runs(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
