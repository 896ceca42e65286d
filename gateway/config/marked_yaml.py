"""YAML to plain data that remembers where each value was written, for errors that name a line.

PyYAML is loaded with the first document: a gateway without a configuration file needs none of it,
which is 1 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

Node = Any
"""PyYAML's: by its `id` a mapping, a sequence or a scalar."""


class YamlProblem(Exception):
    """`line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class MarkedYaml:
    """One document. `data` is what it says: dicts, lists, strings, numbers, booleans and None."""

    def __init__(self, text: str) -> None:
        """Raises YamlProblem for what is not YAML, and for a key that is written twice."""
        yaml = import_module("yaml")
        # libyaml's parser is ten times as quick; without it PyYAML's own does the same.
        loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            loader = loader_class(text)
            try:
                self._root: Node | None = loader.get_single_node()
                for twice in _written_twice(self._root):
                    raise YamlProblem(_line(twice), f"{twice.value}: written twice")
                self.data: Any = loader.construct_document(self._root) if self._root else None
            finally:
                loader.dispose()
        except yaml.MarkedYAMLError as error:
            # `problem` alone: the rest quotes the file, which may hold what nobody should see.
            mark = error.problem_mark or error.context_mark
            raise YamlProblem(mark.line + 1 if mark else 1, f"not YAML: {error.problem}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise YamlProblem(1, f"not YAML: {type(error).__name__}") from None

    def line(self, place: Sequence[str | int]) -> int:
        """Where the value at `place` (keys and indices from the root) was written, from 1.

        Of a value that is not there, the line of the nearest one around it.
        """
        node, line = self._root, 1
        for part in place:
            found = _child(node, part)
            if found is None:
                break
            line, node = found
        return line


def _child(node: Node | None, part: str | int) -> tuple[int, Node] | None:
    """The line of a member (of its key, in a mapping) and the member."""
    if node is None:
        return None
    if node.id == "mapping":
        for key, value in node.value:
            if key.value == str(part):
                return _line(key), value
    elif node.id == "sequence" and isinstance(part, int) and part < len(node.value):
        member = node.value[part]
        return _line(member), member
    return None


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _written_twice(root: Node | None) -> Iterator[Node]:
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
                    continue  # a list or mapping as a key, which no field is called
                if key.value in keys and key.value != "<<":
                    yield key
                keys.add(key.value)
