"""Cline's command line, over chat completions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tests.programs.documented import documented
from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import TEXT, Workspace


class Cline(NpmProgram):
    name = "cline"
    packages = ("cline",)
    executable = "cline"

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        made = {"path": str(workspace.new_file()), "new_text": TEXT}
        return Script(
            calls=[
                Call("read_files?", {"path": str(note), "files": [str(note)]}),
                Call("editor", made),
            ]
        )

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        auth = documented("clients.md", "cline.sh", workspace).strip()
        # The shell finds the program in PATH, as for a user.
        folder = shlex.quote(str(self.path(workspace).parent))
        return ["sh", "-c", f"PATH={folder}:$PATH; {auth} && exec cline 'Read note.txt.'"]
