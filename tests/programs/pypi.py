"""Programs of the Python Package Index, each in its own virtual environment."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs.program import Program, Workspace
from tests.programs.registry_client import QUERY_LIMIT_S, run_client

_UV = Path(sys.executable).with_name("uv")


class PypiProgram(Program):
    """A program installed by uv. `executable` is its name in the environment's bin folder."""

    registry = "pypi"
    well_known = "pip"
    executable: str
    left_out: Sequence[str] = ()
    """Dependencies that are not installed, for example large ones that a run does not import."""

    def install(self, folder: Path, versions: Mapping[str, str]) -> None:
        run_client([sys.executable, "-m", "venv", "--without-pip", folder])
        overrides = folder / "overrides.txt"
        overrides.write_text(
            "".join(f"{name}; sys_platform == 'never'\n" for name in self.left_out)
        )
        wanted = [f"{name}=={versions[name]}" for name in self.packages]
        options = ["--python", folder / "bin" / "python", "--overrides", overrides]
        run_client([_UV, "pip", "install", *options, *wanted])

    def path(self, workspace: Workspace, executable: str = "") -> Path:
        return workspace.installed / "bin" / (executable or self.executable)

    def newest_version(self, package: str) -> str:
        name = package.partition("[")[0]
        index = [sys.executable, "-m", "pip", "--retries", "1", "index", "versions", name]
        found = run_client(index, QUERY_LIMIT_S)
        version = re.match(rf"{re.escape(name)} \((.+)\)", found)
        assert version is not None, found
        return version[1]


def copy_script(name: str, workspace: Workspace) -> Path:
    """Copy a script of this folder to the project, where it cannot import this repository."""
    return Path(shutil.copy(Path(__file__).with_name(name), workspace.project))
