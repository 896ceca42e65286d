"""Parser of YAML documents that also returns the line of each value, for error messages.

PyYAML takes 1 MiB of memory. It is imported only when the first document is parsed, so that a
gateway without a configuration file saves this memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

Node = Any
"""Node of PyYAML's syntax tree. Its `id` is "mapping", "sequence" or "scalar"."""


class YamlProblem(Exception):
    """A YAML error. `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class MarkedYaml:
    """A parsed YAML document, which knows the line of each value.

    `data` is the document as dicts, lists, strings, numbers, booleans and None.
    """

    def __init__(self, text: str) -> None:
        """Parse a document. Raise YamlProblem for invalid YAML and for repeated keys."""
        yaml = import_module("yaml")
        # If PyYAML was built with libyaml, use libyaml's parser, which is ten times as fast and
        # returns the same results.
        loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            loader = loader_class(text)
            try:
                self._root: Node | None = loader.get_single_node()
                for twice in _find_repeated_keys(self._root):
                    raise YamlProblem(_line_of(twice), f"{twice.value}: written twice")
                self.data: Any = loader.construct_document(self._root) if self._root else None
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            # Use only `problem`: the other attributes of the error quote the file, which may
            # contain secrets.
            mark = error.problem_mark or error.context_mark
            raise YamlProblem(mark.line + 1 if mark else 1, f"not YAML: {error.problem}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise YamlProblem(1, f"not YAML: {type(error).__name__}") from None

    def find_line(self, path: Sequence[str | int]) -> int:
        """Return the line number of the value at `path`. Lines count from 1.

        `path` has the keys and indices from the root of the document to the value. If the value is
        missing, return the line of its innermost parent that exists.
        """
        node, line = self._root, 1
        for part in path:
            found = _find_child(node, part)
            if found is None:
                break
            line, node = found
        return line


def _find_child(node: Node | None, part: str | int) -> tuple[int, Node] | None:
    """Return (line, node) of a member of a mapping or sequence. Return None if it is missing.

    For a mapping, the line is the line of the key.
    """
    if node is None:
        return None
    if node.id == "mapping":
        for key, value in node.value:
            if key.value == str(part):
                return _line_of(key), value
    elif node.id == "sequence" and isinstance(part, int) and part < len(node.value):
        member = node.value[part]
        return _line_of(member), member
    return None


def _line_of(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _find_repeated_keys(root: Node | None) -> Iterator[Node]:
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "sequence":
            pending += node.value
        elif node.id == "mapping":
            keys: set[str] = set()
            for key, value in node.value:
                pending.append(value)
                if not isinstance(key.value, str):
                    continue  # skip lists and mappings as keys, which are not field names
                if key.value in keys and key.value != "<<":
                    yield key
                keys.add(key.value)
