"""inspect-ai of the UK's AI Security Institute, over chat completions, Responses and Messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.program import KEY, Workspace
from tests.programs.pypi import PypiProgram, copy_script

_PROVIDERS = ("openai-api/gateway", "openai", "anthropic")


class InspectAi(PypiProgram):
    name = "inspect-ai"
    packages = ("inspect-ai", "openai", "anthropic")
    executable = "inspect"

    def prepare(self, workspace: Workspace) -> Script:
        note = workspace.write_note()
        copy_script("inspect_task.py", workspace)
        return Script(calls=[Call("read_note", {"name": str(note)})])

    def environment(self, workspace: Workspace) -> Mapping[str, str]:
        return {
            "GATEWAY_API_KEY": KEY,
            "GATEWAY_BASE_URL": f"{workspace.url}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_BASE_URL": f"{workspace.url}/v1",
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": workspace.url,
            "INSPECT_LOG_DIR": str(workspace.home / "logs"),
        }

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        models = ",".join(f"{provider}/{workspace.model}" for provider in _PROVIDERS)
        task = ["inspect_task.py", "-T", f"word={workspace.words[0]}", "-T", "path=note.txt"]
        return [self.path(workspace), "eval", *task, "--model", models, "--display", "plain"]

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        # Progress lines have the accuracy too, but after other columns.
        right = len(re.findall(r"^accuracy +1\.0", output, re.M))
        expected = len(_PROVIDERS)
        return [] if right == expected else [f"{right} of {expected} evaluations were right"]
