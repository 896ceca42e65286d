"""Conversion of pydantic's validation errors to messages for clients."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.api import ignored
from gateway.errors import InvalidRequest, UnsupportedParameter

# Names that pydantic adds to an error's path for the branches of a union. All other such names
# contain a bracket, for example `list[...]`.
_BRANCHES = frozenset({"str", "constrained-str", "int"})
# Chat parameters that `rename_parameters` replaces everywhere in an error's message. These names
# contain underscores, so they cannot be English words of the message.
_WORDS = ("max_completion_tokens", "reasoning_effort", "response_format")
_MAX_VALUE_CHARS = 64
_MAX_NAMES = 8
# Maximum number of pydantic's errors to examine. Each costs 2 us.
_MAX_PROBLEMS = 64
_INPUT = "Input should be "
_JSON_TYPES = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "an array",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
}
"""Names of the JSON types that the client should have sent, by pydantic's error type."""
_TAGS = ("union_tag_invalid", "union_tag_not_found")
_TAG = re.compile(r"'([^']*)'")
# Results of `_get_kind` for a field that must be null or an empty list.
_NOT_SERVED = ("none_required", "empty_required")
# pydantic's types of errors whose message already contains the length of the value.
_LENGTHS = ("too_long", "too_short")


class Problem(NamedTuple):
    """An error in a request's body.

    Attributes:
        path: the path of the field, with the client's names.
        words: a message without a full stop.
        type: pydantic's error type.
    """

    path: list[int | str]
    words: str
    type: str


def build_invalid_request(
    error: ValidationError,
    *,
    tagged: Collection[str] = frozenset(),
    unserved: Collection[str] = frozenset(),
) -> InvalidRequest:
    """Build the error for an invalid body, with the parameter's path and the value found.

    Args:
        error: pydantic's error.
        tagged: fields with lists of objects that are distinguished by `type`. If given, paths are
            written as Anthropic does (`system.0.text`), otherwise as OpenAI does (`stop[0]`).
        unserved: types of such objects that this server always refuses. Error messages do not
            suggest these types.
    """
    problem = find_problem(error, unserved)
    path = _without_tags(problem.path, tagged)
    if problem.type in _TAGS:
        path.append("type")
    where = join_dotted(path) if tagged else join_path(path)
    if problem.type == "missing" and len(path) == 1:
        message = f"You must provide the parameter {where}."
    else:
        message = f"{where}: {problem.words}."
        if "content" in path and "literal_error" in problem.type:
            message += " Only text is accepted."
    kind = UnsupportedParameter if problem.type in _NOT_SERVED else InvalidRequest
    return kind(message, param=where or None)


def rename_parameters(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return an error about a chat request with the parameter names of another protocol.

    `names` maps the names of chat parameters to the names in that protocol.
    """
    if type(error).__init__ is not InvalidRequest.__init__:
        return error  # the message quotes a name that the client chose, which must not be renamed
    param, message = error.param or "", error.message
    head = get_top_field(param)
    name = names.get(param) or names.get(head, head) + param.removeprefix(head)
    if name != param:
        message = f"{name}: {message.removeprefix(param).lstrip(': ')}"
    for word in _WORDS:
        message = message.replace(word, names[word])
    return error if message == error.message else type(error)(message, param=name)


def get_top_field(param: str) -> str:
    """Return the first name in a path, for example `tools` for `tools[0].function`."""
    return param.partition(".")[0].partition("[")[0]


def find_problem(error: ValidationError, unserved: Collection[str] = frozenset()) -> Problem:
    """Choose from pydantic's errors the one to report to the client, and return it.

    If a value matches no branch of a union, pydantic reports errors of every branch. The errors of
    the branch in which validation got furthest are preferred: the client most likely meant that
    branch. If several branches failed at the same field, the message lists what each branch
    accepts.
    """
    problems = error.errors(include_url=False)[:_MAX_PROBLEMS]
    picked = max(problems, key=_measure_progress)
    path = get_path(picked)
    if picked["type"] in _TAGS:
        return _build_tag_problem(picked, unserved)
    wanted = [_describe(picked)]
    if _is_of_type(picked):
        others = [each for each in problems if _is_of_type(each) and get_path(each) == path]
        wanted = [*dict.fromkeys(map(_describe, others))]
    words = " or ".join([wanted[0], *(each.removeprefix(_INPUT) for each in wanted[1:])])
    return Problem(path, words + _describe_found(picked), _get_kind(picked))


def _build_tag_problem(problem: ErrorDetails, unserved: Collection[str]) -> Problem:
    """Return the problem for an object whose `type` is missing or unknown."""
    path, value = get_path(problem), problem["input"]
    if problem["type"] == "union_tag_not_found":
        return Problem(path, "Field required" + _describe_fields(value), problem["type"])
    tags = _TAG.findall(problem["ctx"]["expected_tags"])
    allowed = [repr(tag) for tag in tags if tag not in unserved]
    words = " or ".join(filter(None, [", ".join(allowed[:-1]), allowed[-1]]))
    found = show_value(value.get("type") if isinstance(value, dict) else value)
    return Problem(path, f"{_INPUT}{words}; found {found}", problem["type"])


def get_path(problem: ErrorDetails) -> list[int | str]:
    """Return the path of the field in the client's body, without pydantic's union branches."""
    return [part for part in problem["loc"] if not _is_union_branch(part)]


def join_path(path: Iterable[int | str]) -> str:
    """Return a path as OpenAI writes it: `tools[0].function`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def join_dotted(path: Iterable[int | str]) -> str:
    """Return a path as Anthropic writes it: `tools.0.name`."""
    return ".".join(map(str, path))


def show_value(value: Any) -> str:
    """Return a JSON value as text of at most 67 characters. Show only the type of a container."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _shorten(repr(value[: _MAX_VALUE_CHARS + 1]))
    return _shorten(str(value))


def list_names(names: Collection[str]) -> str:
    """Return the first eight names as a comma-separated list, each name escaped and cut."""
    shown = [ignored.escape(name[:_MAX_VALUE_CHARS]) for name in [*names][:_MAX_NAMES]]
    return ", ".join(shown) + (", ..." if len(names) > _MAX_NAMES else "")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."


def _measure_progress(problem: ErrorDetails) -> tuple[bool, int, list[int], int]:
    """Return a sort key: the further validation of a union branch got, the higher the key."""
    path, kind = get_path(problem), problem["type"]
    # Rank the error of a too long list highest: pydantic does not validate that list's items.
    is_too_long = kind == "too_long"
    # Then rank by the index of the invalid list item. The branch with the highest index accepted
    # the most items before it failed.
    indexes = [part for part in path if isinstance(part, int)]
    rank = 1
    if kind in _JSON_TYPES or (kind == "literal_error" and isinstance(problem["input"], dict)):
        rank = 0
    elif kind == "literal_error" and path[-1:] == ["type"]:
        rank = 2  # Rank above missing members: an object of a wrong type also lacks members.
    return is_too_long, len(path), indexes, rank


def _is_of_type(problem: ErrorDetails) -> bool:
    """Return True if the value has a wrong type, or is not one of a few allowed values."""
    return problem["type"] in _JSON_TYPES or problem["type"] == "literal_error"


def _get_kind(problem: ErrorDetails) -> str:
    """Return pydantic's error type; `empty_required` if the field must be an empty list."""
    is_never_filled = problem.get("ctx", {}).get("max_length") == 0
    return "empty_required" if is_never_filled else problem["type"]


def _describe(problem: ErrorDetails) -> str:
    kind = _get_kind(problem)
    if kind in _NOT_SERVED:
        return "not supported by this server; leave it out"
    if kind == "extra_forbidden":
        return "not a known parameter"
    if kind in _JSON_TYPES:
        return _INPUT + _JSON_TYPES[kind]
    return problem["msg"].replace(" after validation", "")


def _describe_found(problem: ErrorDetails) -> str:
    """Return the last part of an error message, which shows the value that the client sent.

    Return "" if the text from `_describe` already shows the value.
    """
    kind, value = _get_kind(problem), problem["input"]
    if kind == "missing":
        return _describe_fields(value)
    if kind in ("extra_forbidden", *_NOT_SERVED, *_LENGTHS):
        return ""
    if kind in ("string_too_long", "string_too_short"):
        return f", not {len(value)}"
    if kind == "type" and isinstance(value, dict):
        return f"; found {show_value(value.get('type'))}"
    return f"; found {show_value(value)}"


def _describe_fields(value: Any) -> str:
    return f"; found {list_names(value)}" if isinstance(value, dict) and value else ""


def _without_tags(path: list[int | str], tagged: Collection[str]) -> list[int | str]:
    """Remove the tags that pydantic adds to a path after an index in a list of tagged objects."""
    return [
        part
        for n, part in enumerate(path)
        if n < 2 or not (isinstance(path[n - 1], int) and path[n - 2] in tagged)
    ]


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)
