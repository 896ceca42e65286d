"""What pydantic found wrong with a body, in words that name no class of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.errors import InvalidRequest

# Pydantic names the tried branch of a union within the location, besides `list[...]` and the like.
_BRANCHES = frozenset({"str", "constrained-str", "int"})
# Of a chat's parameters, those that are no words of any other language.
_WORDS = ("max_completion_tokens", "reasoning_effort", "response_format")


def invalid_request(
    error: ValidationError, *, tagged: Collection[str] = frozenset()
) -> InvalidRequest:
    """The first problem, in words that name the parameter and what was wrong with it.

    `tagged` are fields with lists of objects that are told apart by a field of theirs.
    """
    problem = pick(error)
    path = _without_tags(location(problem), tagged)
    param = str(path[0]) if path else None
    where = ".".join(map(str, path))
    if problem["type"] == "missing" and len(path) == 1:
        return InvalidRequest(f"You must provide the parameter {where}.", param=param)
    if "content" in path and "literal_error" in problem["type"]:
        return InvalidRequest(f"{where}: {problem['msg']}. Only text is accepted.", param=param)
    return InvalidRequest(f"{where}: {words(problem)}.", param=param)


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The refusal of a chat in the words of another protocol: `names` has its for a chat's."""
    param, message = error.param or "", error.message
    name = names.get(param, param)
    if name != param:
        message = f"{name}: {message.removeprefix(param).lstrip(': ')}"
    for word in _WORDS:
        message = message.replace(word, names[word])
    return error if message == error.message else type(error)(message, param=name)


def pick(error: ValidationError) -> ErrorDetails:
    """The problem to tell of: of the branches of a union, the one that got furthest says what was
    meant; one that is of another type altogether says least. A list that is too long got furthest
    of all: its branch was not left for its items."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return max(
        problems,
        key=lambda p: (p["type"] == "too_long", len(p["loc"]), not p["type"].endswith("_type")),
    )


def location(problem: ErrorDetails) -> list[int | str]:
    """The path of the field, as the client wrote it."""
    return [part for part in problem["loc"] if not _is_union_branch(part)]


def _without_tags(path: list[int | str], tagged: Collection[str]) -> list[int | str]:
    """Pydantic names the tag behind the place in the list, where the client has no such field."""
    return [
        part
        for n, part in enumerate(path)
        if n < 2 or not (isinstance(path[n - 1], int) and path[n - 2] in tagged)
    ]


def words(problem: ErrorDetails) -> str:
    """What is wrong there, without a full stop."""
    # Pydantic's own names the class that the object would have become.
    return "Input should be an object" if problem["type"] == "model_type" else problem["msg"]


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)
