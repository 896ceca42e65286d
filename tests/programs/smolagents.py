"""Hugging Face's smolagents, over chat completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.programs.engine.script import Script
from tests.programs.program import Workspace
from tests.programs.pypi import PypiProgram, copy_script


class Smolagents(PypiProgram):
    name = "smolagents"
    packages = ("smolagents[openai]",)
    executable = "python"

    def prepare(self, workspace: Workspace) -> Script:
        workspace.write_note()
        copy_script("smolagents_script.py", workspace)
        code = "final_answer(read_note(name='note.txt').strip())"
        return Script(answer=f"Thought: I read the note.\n<code>\n{code}\n</code>")

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "smolagents_script.py", workspace.url, workspace.model]

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        """Check both agents' lines. For a forced call, the engine's example of a string is x."""
        lines = Counter(output.splitlines())
        expected = (f"Read: The secret is {workspace.words[0]}.", "Called: x")
        return [f"{lines[each]} x {each!r}, not 2" for each in expected if lines[each] != 2]
