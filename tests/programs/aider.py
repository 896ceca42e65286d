"""aider, over chat completions; it replaces a file's content with that in the answer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.documented import documented_variables
from tests.programs.engine.script import Script
from tests.programs.program import Workspace
from tests.programs.pypi import PypiProgram


class Aider(PypiProgram):
    name = "aider"
    packages = ("aider-chat",)
    executable = "aider"

    def prepare(self, workspace: Workspace) -> Script:
        (workspace.project / "note.txt").write_text("Nothing yet.\n", encoding="utf-8")
        word = workspace.new_word()
        return Script(answer=f"note.txt\n```\nThe secret is {word}.\n```\n")

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return documented_variables("clients.md", "aider.sh", workspace)

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        options = ["--yes-always", "--no-git", "--no-check-update", "--no-analytics"]
        options += ["--message", "Write the secret into the note."]
        aider = shlex.join([str(self.path(workspace)), *options, "note.txt"])
        return ["sh", "-c", f"{aider} && cat note.txt && rm note.txt"]

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        """Check that the file's text is the end of the output."""
        text = f"The secret is {workspace.words[0]}."
        return [] if output.rstrip().endswith(text) else ["note.txt was not written"]
