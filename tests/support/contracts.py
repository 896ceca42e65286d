"""Checks that a library still has the undocumented names that this project uses."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType


def missing(names: Mapping[type, tuple[str, ...]]) -> list[str]:
    """Return a sentence for each name that neither the class nor its instances have."""
    return [
        f"{kind.__module__}.{kind.__qualname__} has no {name!r} in this release"
        for kind, wanted in names.items()
        for name in wanted
        if not hasattr(kind, name) and name not in set(_list_assigned(kind))
    ]


def _list_assigned(kind: type) -> Iterator[str]:
    """Yield the attributes that methods of a class or of its bases assign."""
    for base in kind.__mro__:
        for member in vars(base).values():
            if isinstance(member, FunctionType):
                for step in dis.get_instructions(inspect.unwrap(member)):
                    if step.opname == "STORE_ATTR":
                        yield step.argval
