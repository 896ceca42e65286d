"""Versions of programs, and the folders that they are installed in."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs.program import NotAvailable, Program
from tests.programs.programs import PROGRAMS

TREE = Path(__file__).parents[2]
BUILD = TREE / "build" / "programs"
_PINNED = Path(__file__).with_name("versions.toml")
_MARK = ".installed"


@dataclass(frozen=True)
class Installed:
    """A program in a folder, or the reason why the program is not in one."""

    program: Program
    version: str
    """The first package's."""
    folder: Path
    missing: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return what `of` takes, as JSON has it."""
        return {
            "name": self.program.name,
            "version": self.version,
            "folder": str(self.folder),
            "missing": self.missing,
        }

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Installed:
        program, folder = PROGRAMS[fields["name"]], Path(fields["folder"])
        return cls(program, fields["version"], folder, fields["missing"])


def install(program: Program, *, newest: bool) -> Installed:
    """Install a program at its pinned or newest versions, unless that is done already."""
    try:
        versions = _versions(program, newest=newest)
        version = versions[program.packages[0]]
        folder = BUILD / "-".join([program.name, *versions.values()])
        if not (folder / _MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            program.install(folder, versions)
            (folder / _MARK).touch()
    except NotAvailable as reason:
        return Installed(program, "", BUILD, str(reason))
    except subprocess.CalledProcessError as error:
        printed = (error.stderr or b"") + (error.stdout or b"")
        raise SystemExit(f"{program.name}: {error}\n{printed.decode(errors='replace')}") from error
    return Installed(program, version, folder)


def _versions(program: Program, *, newest: bool) -> dict[str, str]:
    if newest:
        return {name: program.newest_version(name) for name in program.packages}
    pinned = tomllib.loads(_PINNED.read_text(encoding="utf-8"))[program.registry]
    return {name: pinned[name] for name in program.packages}
