"""Imports of Python files, found by parsing: no file is run.

An import counts at the top, under TYPE_CHECKING and inside a function. A late import is a
dependency too: the file cannot be understood, moved or changed without the other.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PACKAGES = (
    *(
        "adapters",
        "bench",
        "certificates",
        "demo",
        "deploy",
        "docs",
        "gateway",
        "guides",
        "lora_store",
        "ops",
    ),
    *("tests", "triton_repo"),
)
# In these packages each file or subfolder is a unit. Any other package is one unit.
DIVIDED = ("gateway", "ops", "triton_repo")


@dataclass(frozen=True, slots=True)
class Import:
    """The import of a single name. `module` is the dotted name of the importing file."""

    file: str
    line: int
    module: str
    target: str
    """Dotted name of a module of this project, or of the imported name in a library."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


class Touch(NamedTuple):
    module: str
    line: int
    name: str


def unit_of(module: str) -> str:
    package, *inner = module.split(".")
    return f"{package}.{inner[0] if inner else '__init__'}" if package in DIVIDED else package


class Sources:
    """The project's Python files in `root`."""

    def __init__(self, root: Path = ROOT) -> None:
        self.files = {
            _dotted(path.relative_to(root)): path.relative_to(root).as_posix()
            for package in PACKAGES
            for path in sorted((root / package).rglob("*.py"))
        }
        self.imports: list[Import] = []
        self.own_names: set[str] = set()
        """Names that a file of this project other than a test defines or assigns."""
        self.attributes: list[Touch] = []
        """Attributes that non-test code reads, sets or deletes. Tests are unrestricted."""
        self.strings: list[Touch] = []
        """Strings in non-test code, each of which may be an argument of getattr."""
        with _no_collector():
            for module, file in self.files.items():
                tree = ast.parse((root / file).read_text(encoding="utf-8"))
                if unit_of(module) == "tests":
                    self.imports += self._imports(module, _statements(tree))
                else:
                    nodes = list(ast.walk(tree))
                    self.imports += self._imports(module, nodes)
                    self._read_names(module, nodes)

    def ours(self) -> Iterator[Import]:
        return (found for found in self.imports if found.target in self.files)

    def libraries(self) -> Iterator[Import]:
        """Yield the imports of third-party packages."""
        for found in self.imports:
            if found.target not in self.files and _top(found.target) not in sys.stdlib_module_names:
                yield found

    def _read_names(self, module: str, nodes: list[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.own_names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own_names.add(node.id)
            elif isinstance(node, ast.Attribute):
                self.attributes.append(Touch(module, node.lineno, node.attr))
                # Only `self.x = ...` counts: an attribute of another object may be a library's.
                of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                if of_self and isinstance(node.ctx, ast.Store):
                    self.own_names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.strings.append(Touch(module, node.lineno, node.value))

    def _imports(self, module: str, nodes: Iterable[ast.AST]) -> Iterator[Import]:
        file = self.files[module]
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: write the whole name of the module"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                yield Import(file, node.lineno, module, self._resolved(module, name))

    def _resolved(self, module: str, name: str) -> str:
        # Triton loads a model's files by path, with the model's folder first in `sys.path`. The
        # renderer puts the GPT repository's files beside the other core model's, and `booleans`
        # beside all.
        if module.startswith("triton_repo.") and ".1." in module:
            for folder in (module.rpartition(".")[0], "triton_repo.tensorrt_llm.1", "triton_repo"):
                if (beside := f"{folder}.{_top(name)}") in self.files:
                    return beside
        if _top(name) in PACKAGES:
            while name not in self.files and "." in name:
                name = name.rpartition(".")[0]
        return name


@cache
def sources() -> Sources:
    return Sources()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Disable the garbage collector. It doubles the time by scanning millions of AST nodes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield statements only, at any depth. `ast.walk` yields ten times as many expressions too."""
    left = [tree]
    while left:
        yield (node := left.pop())
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):  # the body of a lambda or conditional expression is no list
                left += inner


def _top(name: str) -> str:
    return name.partition(".")[0]


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
