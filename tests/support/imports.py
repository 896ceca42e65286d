"""What Python files import, read from their syntax: nothing is run.

An import counts wherever it stands: at the head, under TYPE_CHECKING, or inside a function. One
that is put off until a function runs still means that the one file cannot be understood, moved or
changed without the other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGES = (
    *("adapters", "bench", "demo", "deploy", "docs", "gateway", "guides", "lora_store", "ops"),
    *("tests", "triton_repo"),
)
# Each file or folder right inside these is a room of its own; any other package is one room.
DIVIDED = ("gateway", "ops", "triton_repo")


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement of one name. `module` is the importing file's dotted name."""

    file: str
    line: int
    module: str
    target: str
    """A module of ours; or the dotted name in the library, down to the name that is imported."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def room_of(module: str) -> str:
    package, *inner = module.split(".")
    return f"{package}.{inner[0] if inner else '__init__'}" if package in DIVIDED else package


class Sources:
    """All Python files of the project whose root is `root`."""

    def __init__(self, root: Path = ROOT) -> None:
        self.files = {
            _dotted(path.relative_to(root)): path.relative_to(root).as_posix()
            for package in PACKAGES
            for path in sorted((root / package).rglob("*.py"))
        }
        self.nodes = {
            module: list(ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))))
            for module, file in self.files.items()
        }
        self.imports = [found for module in self.files for found in self._imports(module)]

    def ours(self) -> Iterator[Import]:
        return (found for found in self.imports if found.target in self.files)

    def libraries(self) -> Iterator[Import]:
        """Imports of what is neither ours nor Python's own."""
        for found in self.imports:
            if found.target not in self.files and _top(found.target) not in sys.stdlib_module_names:
                yield found

    def own_names(self) -> set[str]:
        """Every name that one of our files defines or assigns to."""
        names: set[str] = set()
        for nodes in self.nodes.values():
            for node in nodes:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    # What is stored in something else may be a library's.
                    names |= {node.attr} if ast.unparse(node.value) == "self" else set()
        return names

    def _imports(self, module: str) -> Iterator[Import]:
        file = self.files[module]
        for node in self.nodes[module]:
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
        # Triton loads a model's files by path, with its folder first in `sys.path`. That of the GPT
        # repository is rendered beside the other core model's.
        if module.startswith("triton_repo.") and ".1." in module:
            for folder in (module.rpartition(".")[0], "triton_repo.tensorrt_llm.1"):
                if (beside := f"{folder}.{_top(name)}") in self.files:
                    return beside
        if _top(name) in PACKAGES:
            while name not in self.files and "." in name:
                name = name.rpartition(".")[0]
        return name


@cache
def sources() -> Sources:
    return Sources()


def _top(name: str) -> str:
    return name.partition(".")[0]


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
