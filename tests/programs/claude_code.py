"""Anthropic's Claude Code, over the Messages API."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs import mcp_server
from tests.programs.documented import documented_variables
from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import TEXT, Workspace


class ClaudeCode(NpmProgram):
    name = "claude-code"
    packages = ("@anthropic-ai/claude-code",)
    executable = "claude"

    def prepare(self, workspace: Workspace) -> Script:
        note, other = workspace.write_note(), workspace.write_note("other.txt")
        server = [mcp_server.__file__, f"The note of the team is {workspace.new_word()}."]
        servers = {"notes": {"command": sys.executable, "args": server}}
        path = workspace.home / "mcp.json"
        path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
        return Script(
            calls=[
                Call("Read", {"file_path": str(note)}),
                Call("Read", {"file_path": str(other)}, together=True),
                Call("ToolSearch", {"query": "select:mcp__notes__read_note"}),
                Call("mcp__notes__read_note", {"title": "team"}),
                Call("Write", {"file_path": str(workspace.new_file()), "content": TEXT}),
                # This tool is offered if an answer by a schema is requested.
                Call("StructuredOutput", {"answer": workspace.answer}),
            ]
        )

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return documented_variables("messages.md", "claude.sh", workspace)

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [*self._options(workspace), "--", "Read both notes."]

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        """Return a command that continues the session and requests an answer by a schema."""
        schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
        options = ["--continue", "--output-format", "json", "--json-schema", json.dumps(schema)]
        return [*self._options(workspace), *options, "--", "What was it?"]

    def _options(self, workspace: Workspace) -> Sequence[str | Path]:
        options = ["--mcp-config", workspace.home / "mcp.json"]
        options += ["--allowedTools", "Read,Write,mcp__notes__read_note"]
        return [self.path(workspace), "--print", *options]
