"""Build hook that compiles the per-token modules for a wheel, on request.

hatchling calls this hook if HATCH_BUILD_HOOK_ENABLE_CUSTOM is true, and installs its dependencies
for that build only; otherwise the wheel is pure Python. pyproject.toml lists the modules, which
need no changes: mypyc reads their types. Their sources remain in the wheel, for tracebacks; Python
prefers the extension beside a source.
"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_GROUP = "gateway.token_path"
"""Name of the library with the code of all modules, which can call each other natively."""
# The same code results whatever is installed beside mypyc: missing packages are typed Any.
_TYPES = ("--config-file=", "--no-site-packages", "--ignore-missing-imports")
# `make lint` checks the other imported modules.
_OTHERS = "--follow-imports=silent"


class CompiledTokenPath(BuildHookInterface[Any]):
    """Hook that adds an extension module for each of `modules` in its configuration."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules. Raises SystemExit with mypy's or the compiler's errors."""
        if version == "editable":
            return  # an editable installation runs the sources
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
    # Imported late: installed for this hook only, and hatchling imports this file in other builds
    # too.
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
