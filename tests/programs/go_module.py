"""Programs of Go modules, compiled at installation."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.program import Program, Workspace
from tests.programs.registry_client import INSTALL_LIMIT_S, QUERY_LIMIT_S, run_client

_SOURCES = Path(__file__).with_name("golang")


class GoProgram(Program):
    """A source file in the folder golang, called with the gateway's URL and the model."""

    registry = "go"
    tools = ("go",)
    well_known = "golang.org/x/text"
    source: str
    expected: Sequence[str]
    """Lines of the output. {answer} stands for the scripted engine's answer."""

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        shutil.copy(_SOURCES / self.source, folder / "main.go")
        wanted = [f"{name}@v{version}" for name, version in versions.items()]
        for command in (["mod", "init", "programs"], ["get", *wanted], ["build", "-o", "program"]):
            _run_go(command, folder)

    def newest_version(self, package: str) -> str:
        listed = ["list", "-m", "-f", "{{.Version}}", f"{package}@latest"]
        return _run_go(listed, Path.home(), QUERY_LIMIT_S).strip().removeprefix("v")

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        return Script(calls=[Call("read_note", {"name": str(note)})])

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [workspace.installed / "program", workspace.url, workspace.model]

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        expected = [line.format(answer=workspace.answer) for line in self.expected]
        printed = output.splitlines()
        return [] if printed == expected else [f"printed {printed}, not {expected}"]


def _run_go(arguments: Sequence[str], folder: Path, limit_s: float = INSTALL_LIMIT_S) -> str:
    # Go must ignore the repository and workspace that surround the folder.
    environment = {"GOFLAGS": "-buildvcs=false -mod=mod", "GOWORK": "off"}
    return run_client(["go", *arguments], limit_s, folder=folder, environment=environment)


class OpenaiGo(GoProgram):
    name = "openai-go"
    packages = ("github.com/openai/openai-go/v3",)
    source = "openai_go.go"
    expected = (*["{answer}"] * 3, "sum 1")
