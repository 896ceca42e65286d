"""What pydantic found wrong with a body, in words that name no class of ours."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from gateway.api.messages import NamedChoice

# Pydantic names the tried branch of a union within the location, besides `list[...]` and the like.
_BRANCHES = frozenset({"str", "constrained-str", "int", NamedChoice.__name__})


def location(problem: ErrorDetails) -> list[int | str]:
    """The path of the field, as the client wrote it."""
    return [part for part in problem["loc"] if not _is_union_branch(part)]


def words(problem: ErrorDetails) -> str:
    """What is wrong there, without a full stop."""
    # Pydantic's own names the class that the object would have become.
    return "Input should be an object" if problem["type"] == "model_type" else problem["msg"]


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)
