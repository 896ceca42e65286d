"""Versions of programs, and their installation folders."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs.program import NotAvailable, Program
from tests.programs.programs import PROGRAMS

TREE = Path(__file__).parents[2]
BUILD = TREE / "build" / "programs"
_PINNED = Path(__file__).with_name("versions.toml")
_MARK = ".installed"
_FAILURES = (subprocess.SubprocessError, OSError)


@dataclass(frozen=True)
class Installed:
    """A program with its folder, or with the reason why it is not installed."""

    program: Program
    version: str
    """Version of the first package."""
    folder: Path
    missing: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the arguments of `of` as JSON values."""
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
    """Install a program at its pinned or newest versions, unless already installed.

    If tools or the registry are missing here, the result has the reason.

    Raises:
        SystemExit: The registry was reached, and the installation failed.
    """
    try:
        if absent := [tool for tool in program.tools if not shutil.which(tool)]:
            raise NotAvailable(f"needs {' and '.join(absent)}")
        if newest:
            _check_registry(program)
        versions = _versions(program, newest=newest)
        version = versions[program.packages[0]]
        folder = BUILD / "-".join([program.name, *versions.values()])
        if not (folder / _MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _fill(program, folder, versions)
            (folder / _MARK).touch()
    except NotAvailable as reason:
        return Installed(program, "", BUILD, str(reason))
    except _FAILURES as error:
        printed = "".join(getattr(error, name, None) or "" for name in ("stderr", "stdout"))
        raise SystemExit(f"{program.name}: {error}\n{printed}") from error
    return Installed(program, version, folder)


def _fill(program: Program, folder: Path, versions: Mapping[str, str]) -> None:
    """Install the versions. Raises NotAvailable if the registry is unreachable, before or after."""
    _check_registry(program)
    try:
        program.install(folder, versions)
    except _FAILURES:
        _check_registry(program)
        raise


def _check_registry(program: Program) -> None:
    """Raise NotAvailable if the registry does not answer for a package that it certainly has."""
    try:
        program.newest_version(program.well_known)
    except _FAILURES as error:
        raise NotAvailable(f"the {program.registry} registry cannot be reached") from error


def _versions(program: Program, *, newest: bool) -> dict[str, str]:
    if newest:
        return {name: program.newest_version(name) for name in program.packages}
    pinned = tomllib.loads(_PINNED.read_text(encoding="utf-8"))[program.registry]
    return {name: pinned[name] for name in program.packages}
