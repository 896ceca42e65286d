"""Programs of the npm registry, which Node runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.programs.program import NotAvailable, Program, Workspace


class NpmProgram(Program):
    """A program that npm installs; `executable` is its name in node_modules/.bin."""

    registry = "npm"
    executable: str

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        if not shutil.which("npm"):
            raise NotAvailable("needs node and npm")
        wanted = [f"{name}@{versions[name]}" for name in self.packages]
        options = ["--no-audit", "--no-fund", "--no-save", "--prefix", str(folder)]
        subprocess.run(["npm", "install", *options, *wanted], check=True, capture_output=True)

    def path(self, workspace: Workspace) -> Path:
        return workspace.installed / "node_modules" / ".bin" / self.executable

    def newest_version(self, package: str) -> str:
        view = ["npm", "view", package, "version", "--json"]
        found = subprocess.run(view, check=True, capture_output=True)
        version: str = json.loads(found.stdout)
        return version
