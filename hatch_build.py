"""Build hook that compiles the modules of the per-token code for a wheel, on request.

hatchling calls this hook if HATCH_BUILD_HOOK_ENABLE_CUSTOM is true, and installs its dependencies
only for that build. Otherwise the wheel is pure Python. pyproject.toml lists the modules. They need
no changes, because mypyc reads their type annotations. Their sources stay in the wheel for
tracebacks. If an extension is beside a source, Python imports the extension.
"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_GROUP = "gateway.token_path"
"""Name of the library with the code of all modules, which therefore call each other natively."""
# Ignore installed packages, and treat missing ones as Any: the same code then results on every
# machine.
_TYPES = ("--config-file=", "--no-site-packages", "--ignore-missing-imports")
# Do not report errors in other imported modules, which `make lint` checks.
_OTHERS = "--follow-imports=silent"


class CompiledTokenPath(BuildHookInterface[Any]):
    """Hook that adds an extension module for each of `modules` in its configuration."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules. Raises SystemExit with the errors of mypy or the compiler."""
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
    # Import here: these packages are installed only for this hook, and hatchling imports this file
    # in other builds, too.
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
