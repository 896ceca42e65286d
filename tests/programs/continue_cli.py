"""Continue's command line, over chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import KEY, TEXT, Workspace

_CONFIGURATION = """\
name: gateway
version: 1.0.0
schema: v1
models:
  - name: {model}
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: {key}
    roles: [chat]
    capabilities: [tool_use]
"""


class ContinueCli(NpmProgram):
    name = "continue"
    packages = ("@continuedev/cli",)
    executable = "cn"

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        text = _CONFIGURATION.format(model=workspace.model, url=workspace.url, key=KEY)
        (workspace.home / "config.yaml").write_text(text, encoding="utf-8")
        other = workspace.write_note("other.txt")
        return Script(
            calls=[
                Call("Read", {"filepath": str(note)}),
                Call("Read", {"filepath": str(other)}, together=True),
                Call("Write", {"filepath": str(workspace.new_file()), "content": TEXT}),
            ]
        )

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "--print", *self._configuration(workspace), "Read note.txt."]

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        return [
            self.path(workspace),
            "--print",
            *self._configuration(workspace),
            "--resume",
            "What was it?",
        ]

    def _configuration(self, workspace: Workspace) -> Sequence[str | Path]:
        return ["--auto", "--config", workspace.home / "config.yaml"]
