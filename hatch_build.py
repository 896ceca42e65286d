"""Compiles what runs once a token, for a wheel that is asked to have it compiled.

hatchling calls this hook where HATCH_BUILD_HOOK_ENABLE_CUSTOM is true, and installs what it needs
for that build alone; without it the wheel is Python and nothing else. The modules are those that
pyproject.toml lists, as they are: mypyc reads their types. Their sources stay in the wheel, for
tracebacks; Python prefers the extension that lies beside one.
"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_GROUP = "gateway.token_path"
"""One library has the code of all modules, so that they call each other without Python."""
# The same code is made whatever is installed beside mypyc: what is missing is typed Any.
_TYPES = ("--config-file=", "--no-site-packages", "--ignore-missing-imports")
# What is imported besides is `make lint`'s to check.
_OTHERS = "--follow-imports=silent"


class CompiledTokenPath(BuildHookInterface[Any]):
    """Puts an extension module beside each of `modules` of the hook's configuration."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises SystemExit with mypy's or the compiler's errors."""
        if version == "editable":
            return  # its code is read where it is written
        self._folder = TemporaryDirectory(prefix="gateway-compiled-")
        built = Path(self._folder.name) / "built"
        with chdir(self.root):
            _compile(self.config["modules"], built)
        libraries = [path for path in built.rglob("*") if path.is_file()]
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"] |= {
            str(path): path.relative_to(built).as_posix() for path in libraries
        }

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def _compile(modules: list[str], built: Path) -> None:
    # Installed for this hook alone, and hatchling imports this file for other builds, too.
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    extensions = mypycify(
        [*_TYPES, _OTHERS, *modules],
        debug_level="0",
        target_dir=str(built.with_name("c")),
        group_name=_GROUP,
    )
    command = build_ext(Distribution({"ext_modules": extensions}))
    command.build_lib, command.build_temp = str(built), str(built.with_name("objects"))
    command.ensure_finalized()
    command.run()
