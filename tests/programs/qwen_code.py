"""qwen-code, over chat completions through the openai SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import KEY, TEXT, Workspace

_OPTIONS = ("--auth-type", "openai", "--approval-mode", "yolo")


class QwenCode(NpmProgram):
    name = "qwen-code"
    packages = ("@qwen-code/qwen-code",)
    executable = "qwen"

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        other = workspace.write_note("other.txt")
        return Script(
            calls=[
                Call("read_file", {"file_path": str(note)}),
                Call("read_file", {"file_path": str(other)}, together=True),
                Call("write_file", {"file_path": str(workspace.new_file()), "content": TEXT}),
            ]
        )

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {
            "OPENAI_BASE_URL": f"{workspace.url}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": workspace.model,
        }

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), *_OPTIONS, "--prompt", "Read note.txt."]

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        return [
            self.path(workspace),
            "--auth-type",
            "openai",
            "--continue",
            "--prompt",
            "What was it?",
        ]
