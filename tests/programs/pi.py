"""pi, over chat completions, with the session continued over Responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import KEY, TEXT, Workspace


class Pi(NpmProgram):
    name = "pi"
    packages = ("@mariozechner/pi-coding-agent",)
    executable = "pi"

    def prepare(self, workspace: Workspace) -> Script:
        providers = {
            api: {
                "baseUrl": f"{workspace.url}/v1",
                "api": f"openai-{api}",
                "apiKey": KEY,
                "models": [{"id": workspace.model, "reasoning": True, "contextWindow": 131_072}],
            }
            for api in ("completions", "responses")
        }
        folder = workspace.home / ".pi" / "agent"
        folder.mkdir(parents=True)
        text = json.dumps({"providers": providers})
        (folder / "models.json").write_text(text, encoding="utf-8")
        notes = workspace.write_note(), workspace.write_note("other.txt")
        return Script(
            calls=[
                Call("read", {"path": str(notes[0])}),
                Call("read", {"path": str(notes[1])}, together=True),
                Call("write", {"path": str(workspace.new_file()), "content": TEXT}),
            ]
        )

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [*self._model(workspace, "completions"), "Read note.txt and other.txt."]

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        return [*self._model(workspace, "responses"), "--continue", "What was it?"]

    def _model(self, workspace: Workspace, provider: str) -> Sequence[str | Path]:
        return [self.path(workspace), "--print", "--model", f"{provider}/{workspace.model}"]
