"""OpenAI's Codex CLI, over the Responses API, with an MCP server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs import mcp_server
from tests.programs.documented import documented
from tests.programs.engine.script import Call, Script
from tests.programs.npm import NpmProgram
from tests.programs.program import KEY, TEXT, Workspace

_SERVER = """
[mcp_servers.notes]
command = "{python}"
args = ["{server}", "The note of the team is {word}."]
"""
_SHELL = "exec_command|shell|local_shell"
_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


class Codex(NpmProgram):
    name = "codex"
    packages = ("@openai/codex",)
    executable = "codex"

    def prepare(self, workspace: Workspace) -> Script:
        notes = workspace.write_note(), workspace.write_note("other.txt")
        folder = workspace.home / ".codex"
        folder.mkdir()
        server = _SERVER.format(
            python=sys.executable, server=mcp_server.__file__, word=workspace.new_word()
        )
        configuration = documented("responses.md", "config.toml", workspace)
        (folder / "config.toml").write_text(f"{configuration}\n{server}", encoding="utf-8")
        shell = [{"cmd": f"cat {note.name}", "command": ["cat", note.name]} for note in notes]
        write = f"cat > {workspace.new_file().name} <<'END'\n{TEXT}END"
        return Script(
            calls=[
                Call(_SHELL, shell[0]),
                Call(_SHELL, shell[1], together=True),
                Call(r".*read_note", {"title": "team"}),
                Call(_SHELL, {"cmd": write, "command": ["sh", "-c", write]}),
            ]
        )

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {"CODEX_KEY": KEY}

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        return [self.path(workspace), "exec", *_OPTIONS, "Read both notes."]

    def follow_up(self, workspace: Workspace) -> Sequence[str | Path]:
        """Return a command that resumes the session and requests an answer by a schema.

        A setting makes the client try a WebSocket first.
        """
        options = ["--config", "model_providers.gateway.supports_websockets=true"]
        options += ["--output-schema", str(_write_schema(workspace))]
        resume = [self.path(workspace), "exec", "resume", "--last"]
        return [*resume, *options, *_OPTIONS, "What was it?"]


def _write_schema(workspace: Workspace) -> Path:
    """Write a schema that only the expected answer matches."""
    path = workspace.home / "schema.json"
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": [workspace.answer]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    path.write_text(json.dumps(schema), encoding="utf-8")
    return path
