"""Parsing of a JSON body into a request, with a decision about every parameter.

A parameter is served, converted to a field of another name, accepted without effect, accepted as a
hint that the response names, or refused by name. `parameter_table` and `renamed_parameters` decide.
An unknown name is handled like a hint or refused. No parameter that matters is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import orjson
from pydantic import ValidationError

from gateway.api.ignored import MAX_NAME_CHARS
from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.openai.messages import Strict
from gateway.api.openai.parameter_table import (
    HARMLESS,
    HINTS,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NOT_SERVED,
    UNSET,
)
from gateway.api.openai.renamed_parameters import CONTAINERS, RENAMED, Fields
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.openai.tool_fields import Path, find_unknown_fields
from gateway.api.strict_json import load_object
from gateway.api.validation import (
    build_invalid_request,
    get_path,
    get_top_field,
    join_path,
    list_names,
    show_value,
)
from gateway.config.settings import Settings
from gateway.errors import InvalidRequest, UnsupportedParameter

R = TypeVar("R", bound=GenerationRequest)
M = TypeVar("M", bound=Strict)

_SERVED_FIELDS = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields
_MAX_TYPO_CHARS = 64
"""Maximum characters of an unknown name for which a similar name is suggested."""


class Parsed(NamedTuple, Generic[M]):
    """A parsed request.

    Attributes:
        request: the request.
        hints: names of parameters that were accepted without effect.
        unknown: the hints whose names are in no table.
    """

    request: M
    hints: tuple[str, ...]
    unknown: tuple[str, ...]


class SortedFields(NamedTuple):
    """The fields of a body, sorted by how they are handled.

    Attributes:
        served: the fields for the model to validate.
        hints: names that were accepted without effect.
        uncounted: names that this endpoint accepts without effect and never refuses, because
            another endpoint of the protocol serves them in the same body.
        unknown: names that are in no table.
        renamed: the client's name of each renamed field, by the field's name.
    """

    served: Fields
    hints: list[str]
    uncounted: list[str]
    unknown: list[str]
    renamed: dict[str, str]


class Rules(TypedDict):
    """The settings about parameters, as keyword arguments of each protocol's `parse`."""

    strict: bool
    refuse_unknown: bool


def get_rules(settings: Settings) -> Rules:
    """Return the settings about parameters as keyword arguments of `parse`."""
    return {"strict": settings.strict_parameters, "refuse_unknown": settings.refuse_unknown}


def parse(
    model: type[R], body: bytes, *, strict: bool = False, refuse_unknown: bool = False
) -> Parsed[R]:
    """Parse and validate the JSON body of a chat or completion request.

    Args:
        model: the class of the request.
        body: the JSON body.
        strict: refuse hints and unknown names.
        refuse_unknown: refuse unknown names.

    Raises:
        InvalidRequest: A parameter is malformed, or its name is unknown and refused.
        UnsupportedParameter: A parameter would change the answer and is not served.
    """
    # null means unset: the SDKs send it for parameters that are passed as None.
    given = {k: v for k, v in _flatten(load_object(body)).items() if v is not None}
    refuse_unknown = strict or refuse_unknown
    served, hints, _, unknown, renamed = sort_fields(
        model, given, strict=strict, refuse_unknown=refuse_unknown
    )
    for name in UNSET.keys() & served.keys():
        if _is_one_of(served[name], UNSET[name]):
            del served[name]
    try:
        request, nested = validate(model, served, refuse_unknown=refuse_unknown)
    except ValidationError as error:
        raise restore_client_name(build_invalid_request(error), renamed) from None
    unknown += nested
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options may only be set together with stream.", param="stream_options"
        )
    if isinstance(request, ChatCompletionRequest) and request.tools:
        if wish := request.strict_unenforced:
            if strict:
                raise UnsupportedParameter(
                    f"{wish} is not supported by this server unless tool_choice forces a call or "
                    "response_format has an object's properties.",
                    param=wish,
                )
            hints.append("tools.function.strict")
        hints += find_uncallable_tools(request, strict=strict)
    return Parsed(request, (*hints, *unknown), tuple(unknown))


def sort_fields(
    model: type[Strict],
    given: Fields,
    *,
    strict: bool,
    refuse_unknown: bool,
    without_effect: Collection[str] = (),
) -> SortedFields:
    """Sort the fields of a body by how each is handled.

    Args:
        model: whose fields are served.
        given: the body; fields that `model` lacks are taken out of it.
        strict: refuse hints.
        refuse_unknown: refuse names that no table has.
        without_effect: names of the protocol that have no effect at this endpoint.

    Raises:
        InvalidRequest: A value cannot be read, or a name is unknown.
        UnsupportedParameter: A field would change the answer and is not served.
    """
    hints: list[str] = []
    uncounted: list[str] = []
    unknown: list[str] = []
    renamed: dict[str, str] = {}
    # Equal to `model_fields`, without the cost of two properties.
    fields = model.__pydantic_fields__
    if given.keys() <= fields.keys():
        return SortedFields(given, hints, uncounted, unknown, renamed)
    others = {name: given.pop(name) for name in [*given] if name not in fields}
    for name, value in others.items():
        if value is None or name in HARMLESS:
            continue
        if name in RENAMED and RENAMED[name].fits(model):
            _rename(name, value, given, renamed)
            found = [*RENAMED[name].hints(value)]
            if found and strict:
                raise _build_unsupported(found[0])
            hints += found
            unknown += _find_unknown_members(name, value)
        elif name in without_effect or (name in RENAMED and RENAMED[name].root in without_effect):
            uncounted.append(name)
        elif name in HINTS and not strict:
            hints.append(name)
        elif name in _SERVED_FIELDS or name in NOT_SERVED or name in HINTS or name in RENAMED:
            _check_neutral(model, name, value)
        else:
            unknown.append(_shorten(name))
    if unknown and refuse_unknown:
        raise _build_unrecognized(unknown, model)
    return SortedFields(given, hints, uncounted, unknown, renamed)


def validate(
    model: type[M],
    fields: Fields,
    *,
    refuse_unknown: bool,
    write_path: Callable[[Iterable[int | str]], str] = join_path,
) -> tuple[M, list[str]]:
    """Return the fields as `model`, and the paths of unknown names within them.

    Args:
        model: the request.
        fields: its fields.
        refuse_unknown: refuse unknown names.
        write_path: writes a path as the protocol does.

    Raises:
        ValidationError: A field is malformed, or a name within one is unknown and refused.
        InvalidRequest: The same for a name within a tool.
    """
    request, paths = _validate(model, fields, refuse_unknown=refuse_unknown)
    if given := fields.get("tools"):
        paths += find_unknown_fields(request.tools, given)  # type: ignore[attr-defined]
    unknown = [_shorten(write_path(path)) for path in paths]
    if unknown and refuse_unknown:
        raise _build_unrecognized(unknown, model)
    return request, unknown


def _validate(model: type[M], fields: Fields, *, refuse_unknown: bool) -> tuple[M, list[Path]]:
    """Return the fields as `model`, and the paths of unknown names within closed objects.

    Raise ValidationError, also for unknown names if these are refused.
    """
    try:
        return model.model_validate(fields), []
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        if refuse_unknown or not unknown:
            raise
    paths = [tuple(get_path(problem)) for problem in unknown]
    return model.model_validate(fields, extra="ignore"), paths


def check_hints(chat: ChatCompletionRequest, hints: list[str], *, strict: bool) -> None:
    """Add the hints of a chat to those of the request that it was converted from.

    With `strict`, raise UnsupportedParameter for any hint.
    """
    if chat.strict_unenforced:
        hints.append("tools.strict")
    if strict and hints:
        param = hints[0].partition("=")[0]
        raise _build_unsupported(hints[0], param=param)
    hints += find_uncallable_tools(chat, strict=strict)


def find_uncallable_tools(chat: ChatCompletionRequest, *, strict: bool) -> list[str]:
    """Return hints for grammars that are not enforced, and for tools that a format excludes.

    With `strict`, raise UnsupportedParameter instead.
    """
    hints: list[str] = []
    if chat.grammar_unenforced:
        hints.append("tools.custom.format")
        if strict:
            raise UnsupportedParameter(
                "tools.custom.format: no grammar of a custom tool is enforced.", param=hints[0]
            )
    if chat.format_excludes_tools:
        hints.append("tools")
        if strict:
            raise UnsupportedParameter(
                "tools: none can be called in an answer that must match this format.",
                param="tools",
            )
    return hints


def _flatten(data: Fields) -> Fields:
    """Move the members of containers to the top level, where existing fields take precedence."""
    if data.keys().isdisjoint(CONTAINERS):
        return data
    for container in CONTAINERS:
        members = data.pop(container, None)
        if members is None:
            continue
        if not isinstance(members, dict):
            raise InvalidRequest(
                f"{container}: Input should be an object; found {show_value(members)}.",
                param=container,
            )
        data = members | {name: value for name, value in data.items() if value is not None}
    return data


def _rename(name: str, value: Any, served: Fields, renamed: dict[str, str]) -> None:
    """Add the fields that `name` stands for to `served`, and the client's name to `renamed`.

    Raise InvalidRequest if a field has another value already.
    """
    for field, meant in RENAMED[name].read(value).items():
        if _is_one_of(meant, UNSET.get(field, ())):
            continue
        given = served.get(field)
        # Only template variables can be merged; any other field can be given once.
        if field == "chat_template_kwargs" and _can_be_joined(meant, given):
            served[field] = meant | given
        elif given is None or _is_same(given, meant):
            served[field] = meant
        else:
            other = renamed.get(field, field)
            raise InvalidRequest(
                f"{name}: found something else than {other} says; leave out one of the two.",
                param=name,
            )
        renamed[field] = name


def _can_be_joined(meant: Fields, given: Any) -> bool:
    return isinstance(given, dict) and not meant.keys() & given.keys()


def restore_client_name(error: InvalidRequest, renamed: dict[str, str]) -> InvalidRequest:
    """Return the error with the client's name of a parameter that was renamed."""
    name = renamed.get(get_top_field(error.param or ""))
    if name is None:
        return error
    return type(error)(f"{name} is read as {error.message}", param=name)


def _check_neutral(model: type[Strict], name: str, value: Any) -> None:
    """Raise UnsupportedParameter unless the value is neutral."""
    here = NEUTRAL_COMPLETION if issubclass(model, CompletionRequest) else NEUTRAL_CHAT
    neutral = (*NOT_SERVED.get(name, ()), *here.get(name, ()))
    if _is_one_of(value, neutral):
        return
    if (successor := _find_successor(model, name)) is not None:
        raise UnsupportedParameter(
            f"{name} is not a parameter of this endpoint; send {successor} instead.", param=name
        )
    # Do not suggest an empty value, which means the same as leaving the parameter out.
    shown = [each for each in neutral if each not in ("", [], {})]
    values = " or ".join([orjson.dumps(each).decode() for each in shown])
    instead = f" or send {values}" if values else ""
    raise _build_unsupported(name, instead)


def _find_successor(model: type[Strict], name: str) -> str | None:
    """Return what to send instead of a parameter, found by its name or by its field."""
    known, other = model.successors, RENAMED.get(name)
    if other is None:
        return known.get(name)
    return known.get(other.path) or known.get(other.root)


def _build_unsupported(
    name: str, instead: str = "", *, param: str | None = None
) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{name} is not supported by this server; leave it out{instead}.", param=param or name
    )


def _build_unrecognized(names: list[str], model: type[Strict]) -> InvalidRequest:
    """Build the error for unknown names, with a similar known name for the first of them."""
    similar: list[str] = []
    if len(names[0]) <= _MAX_TYPO_CHARS:
        similar = get_close_matches(names[0], [*model.model_fields, *RENAMED], n=1, cutoff=0.8)
    meant = f" Did you mean {similar[0]}?" if similar else ""
    arguments = "argument" if len(names) == 1 else "arguments"
    return InvalidRequest(
        f"Unrecognized request {arguments}: {list_names(names)}.{meant}", param=names[0]
    )


def _find_unknown_members(name: str, value: Any) -> list[str]:
    """Return the paths of an object's unknown members."""
    known = RENAMED[name].members
    if known is None or not isinstance(value, dict):
        return []
    return [_shorten(f"{name}.{member}") for member in value if member not in known]


def _shorten(name: str) -> str:
    """Cut a client's name to little more than is shown, to save memory."""
    return name[: MAX_NAME_CHARS + 1]


def _is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    return any(_is_same(value, option) for option in options)


def _is_same(one: Any, other: Any) -> bool:
    """Return True for equal JSON values: 1 equals 1.0, but not true, unlike in Python."""
    return one == other and isinstance(one, bool) is isinstance(other, bool)
