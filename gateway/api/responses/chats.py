"""A request of the Responses API read, and as the chat request that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, SkipValidation, ValidationError

from gateway.api.chat_tools import Tool
from gateway.api.parameters import Parsed, check_hints, sort_fields, validate
from gateway.api.responses.item_messages import check_outputs
from gateway.api.responses.items import (
    AdditionalToolsItem,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
)
from gateway.api.responses.requests import ResponsePrompt, ResponseRequest
from gateway.api.responses.tool_names import ToolCallNames
from gateway.api.responses.tools import MAX_TOOLS
from gateway.api.schemas import OF_TOOL, ChatCompletionRequest
from gateway.api.strict_json import load_object
from gateway.api.validation import invalid_request, renamed
from gateway.errors import InvalidRequest

_PLACEHOLDER = MessageItem(role="user", content="")

_RESPONSE_PARAMETERS: dict[str, str] = {
    "chat_template_kwargs.enable_thinking": "reasoning.effort",
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""What a chat's parameters are called here, where that differs."""


class ResponsesChat(ChatCompletionRequest):
    """A chat, with the request that it was."""

    original: ResponsePrompt
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_paths: tuple[str, ...] = ()
    """The paths of `tools` in the request."""
    called_tools: SkipValidation[Mapping[str, ToolCallNames]] = Field(default_factory=dict)
    """Kinds of calls by the model's name for the tool, without plain functions."""
    tool_hints: tuple[str, ...] = ()
    echoed_fields: bytes = b""
    """What the answer tells of the request: a JSON object."""

    @property
    def plain_text_tools(self) -> frozenset[str]:
        called = self.called_tools.items()
        return frozenset([name for name, tool in called if tool.kind == "custom_tool_call"])

    def _check_tool_messages(self) -> None:
        """Leave this to `check_outputs`: items that come before may not be known yet."""

    def name_place(self, place: str) -> str:
        if place == "response_format.json_schema.schema":
            return "text.format.schema"
        return _translate_tool_path(place, self.tool_paths)


def parse(
    model: type[ResponsePrompt],
    body: bytes,
    *,
    strict: bool = False,
    refuse_unknown: bool = False,
) -> Parsed[ResponsesChat]:
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
        original, nested = validate(model, fields.served, refuse_unknown=refuse_unknown)
    except ValidationError as error:
        raise invalid_request(error) from None
    unknown = (*fields.unknown, *nested)
    own = original.items
    if original.continues:
        # What comes before these, and what references are to, is not known yet.
        own = [_PLACEHOLDER if isinstance(item, ItemReference) else item for item in own]
        if all(isinstance(item, AdditionalToolsItem | ReasoningItem) for item in own):
            own = [_PLACEHOLDER, *own]  # a chat needs a message, and these may make none
    chat = build_chat(original, own, complete=not original.continues)
    if not original.continues:
        check_outputs(own)
    hints = [*fields.hints, *original.hints, *chat.tool_hints]
    if chat.tools or hints:
        check_hints(chat, hints, strict=strict)
    return Parsed(chat, (*hints, *fields.uncounted, *unknown), unknown)


def build_chat(
    original: ResponsePrompt, items: Sequence[Item], *, complete: bool = True
) -> ResponsesChat:
    """The chat of a request: of its own items and those that are before, or of what is left.

    `complete` as in `ResponsePrompt.chat`. Raises InvalidRequest.
    """
    values = original.build_chat_fields(items, complete=complete)
    fields = {name: value for name, value in values.items() if value is not None}
    try:
        return ResponsesChat.model_validate(
            fields | {"original": original, "echoed_fields": original.build_echo()}
        )
    except ValidationError as error:
        raise rename_parameter(invalid_request(error)) from None


def rename_parameter(error: InvalidRequest) -> InvalidRequest:
    """Names the parameter as the client wrote it, where a chat calls it otherwise."""
    return renamed(error, _RESPONSE_PARAMETERS)


def _translate_tool_path(name: str, paths: Sequence[str]) -> str:
    """A tool's parameter as it is called here."""
    match = OF_TOOL.fullmatch(name)
    if match is None:
        return name
    return f"{paths[int(match[1])]}.{match[2]}"
