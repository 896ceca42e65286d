"""Continue's command line, over chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.programs.documented import documented
from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import TEXT, Workspace


class ContinueCli(NpmProgram):
    name = "continue"
    packages = ("@continuedev/cli",)
    executable = "cn"

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        folder = workspace.home / ".continue"
        folder.mkdir()
        text = documented("clients.md", "config.yaml", workspace)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        other = workspace.write_note("other.txt")
        return Script(
            calls=[
                Call("Read", {"filepath": str(note)}),
                Call("Read", {"filepath": str(other)}, together=True),
                Call("Write", {"filepath": str(workspace.new_file()), "content": TEXT}),
            ]
        )

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "--print", "--auto", "Read note.txt."]

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "--print", "--auto", "--resume", "What was it?"]
