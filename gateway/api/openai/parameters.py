"""Parsing of a JSON body into a request, with a decision about every parameter.

Each parameter is handled in one of these ways:

- served: the request's model has a field of this name;
- renamed: converted to a field of another name (`renamed_parameters`);
- accepted silently, as it cannot affect the answer (`parameter_table.HARMLESS`);
- hint: accepted without effect, and named in the response header x-ignored-parameters;
- refused by name, as it would change the answer (`parameter_table.NOT_SERVED`).

An unknown name is handled like a hint, or refused if the settings say so.
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
    """A parsed request, with the names of the parameters that have no effect.

    Attributes:
        request: the request.
        hints: the names of all parameters without effect, for the header x-ignored-parameters.
        unknown: the names in `hints` that neither a request model nor a table of parameters has.
    """

    request: M
    hints: tuple[str, ...]
    unknown: tuple[str, ...]


class SortedFields(NamedTuple):
    """The parameters of a request's body, sorted by how the gateway handles them.

    Attributes:
        served: the values of the request model's fields, not yet validated.
        hints: names of parameters that have no effect.
        uncounted: names of parameters that only another endpoint of the protocol serves. Clients
            may send the same body to both endpoints. So these parameters are never refused here,
            but have no effect.
        unknown: names that neither the request model nor a table of parameters has.
        renamed: for each field that the client set under another name, the client's name.
    """

    served: Fields
    hints: list[str]
    uncounted: list[str]
    unknown: list[str]
    renamed: dict[str, str]


class Rules(TypedDict):
    """The settings for handling parameters, as keyword arguments of each protocol's `parse`."""

    strict: bool
    refuse_unknown: bool


def get_rules(settings: Settings) -> Rules:
    """Return the settings for handling parameters as keyword arguments of `parse`."""
    return {"strict": settings.strict_parameters, "refuse_unknown": settings.refuse_unknown}


def parse(
    model: type[R], body: bytes, *, strict: bool = False, refuse_unknown: bool = False
) -> Parsed[R]:
    """Parse and validate the JSON body of a chat or completion request.

    Args:
        model: the class of the request.
        body: the JSON body.
        strict: refuse parameters that have no effect here, and unknown names.
        refuse_unknown: refuse unknown names.

    Raises:
        InvalidRequest: A parameter is malformed, or its name is unknown and refused.
        UnsupportedParameter: A parameter is not supported: it would change the answer, or it has no
            effect and `strict` is set.
    """
    # Drop fields with null, which means unset: the SDKs send null for arguments that are None.
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
    """Return the fields of a body, sorted by how each is handled.

    Args:
        model: the pydantic model of the request. Its fields are the parameters that are served.
        given: the body. Fields that `model` lacks are removed from this dict.
        strict: refuse parameters that have no effect here, instead of ignoring them.
        refuse_unknown: refuse names that neither this server nor any known server uses.
        without_effect: parameters of the protocol that have no effect at this endpoint.

    Raises:
        InvalidRequest: A value cannot be read, or a name is unknown.
        UnsupportedParameter: A field would change the answer and is not served.
    """
    hints: list[str] = []
    uncounted: list[str] = []
    unknown: list[str] = []
    renamed: dict[str, str] = {}
    # Read the dict directly: `model_fields` returns the same dict after two property lookups.
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
    """Return an instance of `model`, and the paths of unknown names inside its fields' values.

    Args:
        model: the request's model.
        fields: the values of the fields.
        refuse_unknown: refuse unknown names.
        write_path: converts a path to text in the protocol's notation.

    Raises:
        ValidationError: A field's value is malformed, or has an unknown name that is refused.
        InvalidRequest: A tool has an unknown name that is refused.
    """
    request, paths = _validate(model, fields, refuse_unknown=refuse_unknown)
    if given := fields.get("tools"):
        paths += find_unknown_fields(request.tools, given)  # type: ignore[attr-defined]
    unknown = [_shorten(write_path(path)) for path in paths]
    if unknown and refuse_unknown:
        raise _build_unrecognized(unknown, model)
    return request, unknown


def _validate(model: type[M], fields: Fields, *, refuse_unknown: bool) -> tuple[M, list[Path]]:
    """Return an instance of `model`, and the paths of unknown names that `model` forbids.

    Raise ValidationError for malformed fields, and for unknown names if `refuse_unknown`.
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
    """Add to `hints` the names of tool features that have no effect in this request.

    `chat` is the chat request to which a request of another protocol was converted. `hints` are
    names for the header x-ignored-parameters. With `strict`, raise UnsupportedParameter if there is
    any such name.
    """
    if chat.strict_unenforced:
        hints.append("tools.strict")
    if strict and hints:
        param = hints[0].partition("=")[0]
        raise _build_unsupported(hints[0], param=param)
    hints += find_uncallable_tools(chat, strict=strict)


def find_uncallable_tools(chat: ChatCompletionRequest, *, strict: bool) -> list[str]:
    """Return names, for the header x-ignored-parameters, of tool features without effect.

    The grammars of custom tools never have an effect. All tools are without effect if the answer
    must match a format that excludes calls. With `strict`, raise UnsupportedParameter instead.
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
    """Return the body with the members of `CONTAINERS` moved to its top level.

    A field at the top level takes precedence. Raise InvalidRequest for a container that is not an
    object.
    """
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
    """Convert the parameter `name`, a key of `RENAMED`, to the fields that it stands for.

    Add the fields to `served`, and map each of them to `name` in `renamed`. Raise InvalidRequest if
    `served` already has a different value for one of the fields.
    """
    for field, meant in RENAMED[name].read(value).items():
        if _is_one_of(meant, UNSET.get(field, ())):
            continue
        given = served.get(field)
        # Merge template variables: several parameters may each set a different variable. Refuse two
        # different values for any other field.
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
    """Return the error with the client's name of the parameter.

    `renamed` maps fields to the client's names. Errors about other fields are returned unchanged.
    """
    name = renamed.get(get_top_field(error.param or ""))
    if name is None:
        return error
    return type(error)(f"{name} is read as {error.message}", param=name)


def _check_neutral(model: type[Strict], name: str, value: Any) -> None:
    """Raise UnsupportedParameter if `value` is not one of the parameter's neutral values."""
    here = NEUTRAL_COMPLETION if issubclass(model, CompletionRequest) else NEUTRAL_CHAT
    neutral = (*NOT_SERVED.get(name, ()), *here.get(name, ()))
    if _is_one_of(value, neutral):
        return
    if (successor := _find_successor(model, name)) is not None:
        raise UnsupportedParameter(
            f"{name} is not a parameter of this endpoint; send {successor} instead.", param=name
        )
    # Do not suggest empty values: the error suggests already to leave the parameter out.
    shown = [each for each in neutral if each not in ("", [], {})]
    values = " or ".join([orjson.dumps(each).decode() for each in shown])
    instead = f" or send {values}" if values else ""
    raise _build_unsupported(name, instead)


def _find_successor(model: type[Strict], name: str) -> str | None:
    """Return the parameter that a client should send to this endpoint instead of `name`.

    Return None if no such parameter is known. If `name` is a key of `RENAMED`, look up the field to
    which `name` would be converted.
    """
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
    """Build the error for unknown names.

    The message suggests a known name that is similar to `names[0]`, if there is one.
    """
    similar: list[str] = []
    if len(names[0]) <= _MAX_TYPO_CHARS:
        similar = get_close_matches(names[0], [*model.model_fields, *RENAMED], n=1, cutoff=0.8)
    meant = f" Did you mean {similar[0]}?" if similar else ""
    arguments = "argument" if len(names) == 1 else "arguments"
    return InvalidRequest(
        f"Unrecognized request {arguments}: {list_names(names)}.{meant}", param=names[0]
    )


def _find_unknown_members(name: str, value: Any) -> list[str]:
    """Return the paths of unknown members in the value of the parameter `name`, a key of `RENAMED`.

    Return an empty list if the value is not an object.
    """
    known = RENAMED[name].members
    if known is None or not isinstance(value, dict):
        return []
    return [_shorten(f"{name}.{member}") for member in value if member not in known]


def _shorten(name: str) -> str:
    """Cut a client's name to `MAX_NAME_CHARS` + 1 characters, to save memory.

    `ignored.escape` cuts the name to `MAX_NAME_CHARS`. It needs the extra character to see that the
    name was longer.
    """
    return name[: MAX_NAME_CHARS + 1]


def _is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    return any(_is_same(value, option) for option in options)


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two JSON values are equal. Unlike in Python, 1 does not equal true."""
    return one == other and isinstance(one, bool) is isinstance(other, bool)
