"""A request of the Responses API read, and as the chat request that it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from gateway.api.messages import Strict
from gateway.api.parameters import Parsed, sort_fields, uncallable_tools, validate
from gateway.api.responses.items import Item, ItemReference, MessageItem, check_outputs
from gateway.api.responses.requests import ResponsePrompt, ResponseRequest
from gateway.api.schemas import ChatCompletionRequest
from gateway.api.strict_json import load_object
from gateway.api.validation import invalid_request, location, pick, renamed, words
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation import Guide

M = TypeVar("M", bound=Strict)

_SAID = MessageItem(role="user", content="")

_WRITTEN: dict[str, str] = {
    "chat_template_kwargs.enable_thinking": "reasoning.effort",
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""What a chat's parameters are called here, where that differs."""
_OF_TOOL = re.compile(r"tools\[(\d+)\]\.function\.(\w+)")


class Chat(ChatCompletionRequest):
    """A chat, with the request that it was."""

    asked: ResponsePrompt
    tool_places: tuple[int, ...] = ()
    """Of the tools that are offered, among those of the request."""
    told: bytes = b""
    """What the answer tells of the request: a JSON object."""

    def guide_parts(self) -> Sequence[tuple[Guide, str]]:
        parts = super().guide_parts()
        return [(guide, _place(name, self.tool_places)) for guide, name in parts]


def parse(
    model: type[ResponsePrompt],
    body: bytes,
    *,
    strict: bool = False,
    refuse_unknown: bool = False,
) -> Parsed[Chat]:
    """Validate a JSON body. `strict` refuses hints, `refuse_unknown` names that no table has.

    Raises InvalidRequest or UnsupportedParameter naming the parameter.
    """
    refuse_unknown = strict or refuse_unknown
    fields = sort_fields(
        model,
        load_object(body or b"{}"),
        strict=strict,
        refuse_unknown=refuse_unknown,
        without_effect=() if model is ResponseRequest else ResponseRequest.model_fields.keys(),
    )
    try:
        asked, nested = validate(model, fields.served, refuse_unknown=refuse_unknown)
    except ValidationError as error:
        raise _invalid(error) from None
    unknown = (*fields.unknown, *nested)
    own = asked.items
    if asked.continues:
        # What comes before these, and what references are to, is not known yet.
        own = [_SAID if isinstance(item, ItemReference) else item for item in own] or [_SAID]
    chat = chat_of(asked, own)
    if not asked.continues:
        check_outputs(own)
    hints = [*fields.hints, *asked.hints]
    if chat.strict_unenforced:
        hints.append("tools.strict")
    if strict and hints:
        raise UnsupportedParameter(f"{hints[0]} is not supported by this server.", param=hints[0])
    hints += uncallable_tools(chat, strict=strict)
    return Parsed(chat, (*hints, *unknown), unknown)


def validated(model: type[M], body: bytes) -> M:
    """A JSON body as `model`. Raises InvalidRequest naming the parameter."""
    try:
        return model.model_validate(load_object(body or b"{}"))
    except ValidationError as error:
        raise _invalid(error) from None


def chat_of(asked: ResponsePrompt, items: Sequence[Item]) -> Chat:
    """The chat of a request: of its own items and those that are before, or of what is left.

    Raises InvalidRequest.
    """
    fields = {name: value for name, value in asked.chat(items).items() if value is not None}
    try:
        return Chat.model_validate(fields | {"asked": asked, "told": asked.told()})
    except ValidationError as error:
        raise as_written(invalid_request(error)) from None


def as_written(error: InvalidRequest) -> InvalidRequest:
    """Names the parameter as the client wrote it, where a chat calls it otherwise."""
    return renamed(error, _WRITTEN)


def _place(name: str, places: Sequence[int]) -> str:
    """A tool's parameter as it is called here."""
    found = _OF_TOOL.fullmatch(name)
    if found is None:
        return name
    return f"tools[{places[int(found[1])]}].{found[2]}"


def _invalid(error: ValidationError) -> InvalidRequest:
    """What is wrong with a body, with the path of the field as OpenAI writes it."""
    problem = pick(error)
    path = location(problem)
    param = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
    if problem["type"] == "missing" and len(path) == 1:
        return InvalidRequest(f"You must provide the parameter {param}.", param=param)
    return InvalidRequest(f"{param}: {words(problem)}.", param=param)
