"""Anthropic's Claude Code, over the Messages API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import KEY, Workspace


class ClaudeCode(NpmProgram):
    name = "claude-code"
    packages = ("@anthropic-ai/claude-code",)
    executable = "claude"

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        return Script(calls=[Call("Read", {"file_path": str(note)})])

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        models = (
            *("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
            *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")),
        )
        return {
            "ANTHROPIC_BASE_URL": workspace.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            **dict.fromkeys(models, workspace.model),
        }

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "--print", "--allowedTools", "Read", "--", "Read note.txt."]
