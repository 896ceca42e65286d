"""Programs of the npm registry, run by Node."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.programs.engine.script import Call, Script
from tests.programs.program import Program, Workspace
from tests.programs.registry_client import QUERY_LIMIT_S, run_client


class NpmProgram(Program):
    """A program installed by npm. `executable` is its name in node_modules/.bin."""

    registry = "npm"
    tools = ("node", "npm")
    well_known = "ms"
    executable: str

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        wanted = [f"{name}@{versions[name]}" for name in self.packages]
        options = ["--no-audit", "--no-fund", "--no-save", "--prefix", str(folder)]
        run_client(["npm", "install", *options, *wanted])

    def path(self, workspace: Workspace) -> Path:
        return workspace.installed / "node_modules" / ".bin" / self.executable

    def newest_version(self, package: str) -> str:
        # An empty cache, as npm would otherwise answer from its cache while the registry is down.
        with tempfile.TemporaryDirectory() as cache:
            options = ["--cache", cache, "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
            view = ["npm", "view", package, "version", "--json", *options]
            version: str = json.loads(run_client(view, QUERY_LIMIT_S))
        return version


class NodeScript(NpmProgram):
    """A script in this folder for packages without an executable.

    The script is called with the gateway's URL, the model and the note's path, and prints a line
    per answer.
    """

    script: str
    answers: int
    """Number of answers that the script requests, one after the other."""

    def prepare(self, workspace: Workspace) -> Script:
        workspace.write_note()
        # Node looks for packages only beside the script.
        shutil.copy(Path(__file__).with_name(self.script), workspace.installed)
        call = Call("read_note", {"name": "note.txt"})
        return Script(calls=[call, replace(call, together=True)])

    def command(self, workspace: Workspace) -> Sequence[str | Path]:
        note = workspace.project / "note.txt"
        script = workspace.installed / self.script
        return ["node", script, workspace.url, workspace.model, note]

    def judge(self, workspace: Workspace, output: str) -> list[str]:
        found = output.count(workspace.answer)
        return [] if found == self.answers else [f"{found} answers, not {self.answers}"]
