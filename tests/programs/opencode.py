"""opencode, over chat completions through the AI SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.documented import documented
from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import TEXT, Workspace


class Opencode(NpmProgram):
    name = "opencode"
    packages = ("opencode-ai",)
    executable = "opencode"

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        configuration = documented("clients.md", "opencode.json", workspace)
        (workspace.project / "opencode.json").write_text(configuration, encoding="utf-8")
        other = workspace.write_note("other.txt")
        return Script(
            calls=[
                Call("read", {"filePath": str(note)}),
                Call("read", {"filePath": str(other)}, together=True),
                Call("write", {"filePath": str(workspace.new_file()), "content": TEXT}),
            ]
        )

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {}

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "run", "Read note.txt."]

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "run", "--continue", "What was it?"]
