"""What becomes of every parameter: a body of JSON to a request.

A parameter is served, read as what it is called here, accepted without effect because it has no
meaning to lose, accepted as a hint that the answer names, or refused by name; nothing is dropped
silently. `parameter_table` says which.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from gateway.api.generation_request import GenerationRequest
from gateway.api.parameter_table import (
    HARMLESS,
    HINTS,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NOT_SERVED,
    RENAMED,
    UNSET,
    Fields,
)
from gateway.api.schemas import ChatCompletionRequest
from gateway.api.strict_json import load_object
from gateway.api.validation import invalid_request
from gateway.errors import InvalidRequest, UnsupportedParameter

R = TypeVar("R", bound=GenerationRequest)


class Parsed(NamedTuple, Generic[R]):
    """`hints` are the names of parameters that were accepted and mean nothing here."""

    request: R
    hints: tuple[str, ...]


def parse(model: type[R], body: bytes, *, strict: bool = False) -> Parsed[R]:
    """Validates a JSON body. `strict` refuses hints.

    Raises InvalidRequest or UnsupportedParameter naming the parameter.
    """
    fields = model.model_fields
    # null means unset: the SDKs send it for parameters that are passed as None.
    given = _flat(load_object(body)).items()
    served: Fields = {name: value for name, value in given if value is not None}
    others: Fields = {}
    if not served.keys() <= fields.keys():
        others = {name: served.pop(name) for name in [*served] if name not in fields}
    for name in UNSET.keys() & served.keys():
        if _is_one_of(served[name], UNSET[name]):
            del served[name]
    renamed: dict[str, str] = {}
    hints = []
    for name, value in others.items():
        if name in RENAMED and RENAMED[name].fits(model):
            _rename(name, value, served, renamed)
        elif name in HINTS and not strict:
            hints.append(name)
        elif name not in HARMLESS:
            _check_not_served(model, name, value)
    try:
        request = model.model_validate(served)
    except ValidationError as error:
        raise _as_written(invalid_request(error), renamed) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options may only be set together with stream.", param="stream_options"
        )
    if isinstance(request, ChatCompletionRequest):
        if wish := request.strict_unenforced:
            if strict:
                raise UnsupportedParameter(
                    f"{wish} is not supported by this server unless tool_choice forces a call or "
                    "response_format has an object's properties.",
                    param=wish,
                )
            hints.append("tools.function.strict")
        hints += uncallable_tools(request, strict=strict)
    return Parsed(request, tuple(hints))


def uncallable_tools(chat: ChatCompletionRequest, *, strict: bool) -> list[str]:
    """The hints of grammars that are not enforced, and of tools where a format rules calls out.

    `strict` refuses them. Raises UnsupportedParameter.
    """
    hints: list[str] = []
    if not chat.tools:
        return hints
    if chat.grammar_unenforced:
        hints.append("tools.custom.format")
        if strict:
            raise UnsupportedParameter(
                "tools.custom.format: no grammar of a custom tool is enforced.", param=hints[0]
            )
    if chat.tools_beside_format:
        hints.append("tools")
        if strict:
            raise UnsupportedParameter(
                "tools: none can be called in an answer that must match this format.",
                param="tools",
            )
    return hints


def _flat(data: Fields) -> Fields:
    """Ollama has a place of its own, `options`, for all that is not OpenAI's."""
    options = data.pop("options", None)
    if options is None:
        return data
    if not isinstance(options, dict):
        raise InvalidRequest("options: Input should be an object.", param="options")
    return options | {name: value for name, value in data.items() if value is not None}


def _rename(name: str, value: Any, served: Fields, renamed: dict[str, str]) -> None:
    """Puts what `name` means into `served`, and who said so into `renamed`."""
    for field, meant in RENAMED[name].read(value).items():
        if _is_one_of(meant, UNSET.get(field, ())):
            continue
        given = served.get(field)
        # Variables of the template add up; of anything else there can be only one.
        if field == "chat_template_kwargs" and _can_be_joined(meant, given):
            served[field] = meant | given
        elif given is None or _is_same(given, meant):
            served[field] = meant
        else:
            other = renamed.get(field, field)
            raise InvalidRequest(f"{name} and {other} exclude each other.", param=name)
        renamed[field] = name


def _can_be_joined(meant: Fields, given: Any) -> bool:
    return isinstance(given, dict) and not meant.keys() & given.keys()


def _as_written(error: InvalidRequest, renamed: dict[str, str]) -> InvalidRequest:
    """Names what the client wrote where that was read as something else."""
    name = renamed.get(error.param or "")
    if name is None:
        return error
    return InvalidRequest(f"{name} is read as {error.message}", param=name)


def _check_not_served(model: type[R], name: str, value: Any) -> None:
    """Raises UnsupportedParameter and InvalidRequest unless it asks for nothing."""
    here = NEUTRAL_CHAT if issubclass(model, ChatCompletionRequest) else NEUTRAL_COMPLETION
    neutral = NOT_SERVED.get(name)
    if neutral is None and name not in here and name not in HINTS and name not in RENAMED:
        raise InvalidRequest(f"Unrecognized request argument: {name}.", param=name)
    if not _is_one_of(value, (*(neutral or ()), *here.get(name, ()))):
        raise UnsupportedParameter(f"{name} is not supported by this server.", param=name)


def _is_one_of(value: Any, options: tuple[Any, ...]) -> bool:
    return any(_is_same(value, option) for option in options)


def _is_same(one: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0. For Python it is True as well."""
    return one == other and isinstance(one, bool) is isinstance(other, bool)
