"""Parsing of a Responses API request into an equivalent chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, SkipValidation, ValidationError

from gateway.api.openai.chat_tools import Tool
from gateway.api.openai.parameters import Parsed, check_hints, sort_fields, validate
from gateway.api.openai.schemas import TOOL_PATH, ChatCompletionRequest
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
from gateway.api.strict_json import load_object
from gateway.api.validation import build_invalid_request, rename_parameters
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
"""Chat parameters that the Responses API names differently, each with its name in that API."""


class ResponsesChat(ChatCompletionRequest):
    """A chat request made from a request of the Responses API."""

    original: ResponsePrompt
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_paths: tuple[str, ...] = ()
    """The paths of `tools` in the original request."""
    called_tools: SkipValidation[Mapping[str, ToolCallNames]] = Field(default_factory=dict)
    """The `ToolCallNames` of the request's tools, by the names that the tools have in the prompt.

    Tool calls are returned to the client with the item type and the names in `ToolCallNames`.
    Functions without a namespace are left out.
    """
    tool_hints: tuple[str, ...] = ()
    echoed_fields: bytes = b""
    """The request's fields that the response repeats, as a JSON object."""

    @property
    def plain_text_tools(self) -> frozenset[str]:
        called = self.called_tools.items()
        return frozenset([name for name, tool in called if tool.kind == "custom_tool_call"])

    def _check_tool_messages(self) -> None:
        """Do nothing, because earlier items of the conversation may not be loaded yet.

        `check_outputs` checks the tool messages once all items are loaded.
        """

    def describe_path(self, path: str) -> str:
        if path == "response_format.json_schema.schema":
            return "text.format.schema"
        return _translate_tool_path(path, self.tool_paths)


def parse(
    model: type[ResponsePrompt],
    body: bytes,
    *,
    strict: bool = False,
    refuse_unknown: bool = False,
) -> Parsed[ResponsesChat]:
    """Validate a JSON body and return it as a chat request.

    Args:
        model: The request model to validate against.
        body: The JSON text.
        strict: Refuse parameters that would be accepted without effect.
        refuse_unknown: Refuse parameters that are not known.

    Raises:
        InvalidRequest: A parameter is wrong; the error names the parameter.
        UnsupportedParameter: This server does not support the parameter.
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
        raise build_invalid_request(error) from None
    unknown = (*fields.unknown, *nested)
    own = original.items
    if original.continues:
        # Use placeholders: earlier items and referenced items are not loaded yet.
        own = [_PLACEHOLDER if isinstance(item, ItemReference) else item for item in own]
        if all(isinstance(item, AdditionalToolsItem | ReasoningItem) for item in own):
            # Add a placeholder: a chat needs a message, and these items may yield none
            own = [_PLACEHOLDER, *own]
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
    """Return the chat request that consists of these items.

    Args:
        original: The request.
        items: Earlier items followed by the request's own items. The oldest items may be left out.
        complete: False while earlier items are not loaded yet.

    Raises:
        InvalidRequest: The items do not form a valid chat.
    """
    values = original.build_chat_fields(items, complete=complete)
    fields = {name: value for name, value in values.items() if value is not None}
    try:
        return ResponsesChat.model_validate(
            fields | {"original": original, "echoed_fields": original.build_echo()}
        )
    except ValidationError as error:
        raise rename_parameter(build_invalid_request(error)) from None


def rename_parameter(error: InvalidRequest) -> InvalidRequest:
    """Convert an error about a chat request to an error about the Responses API request.

    In the returned error, the chat parameter has its name in the Responses API.
    """
    return rename_parameters(error, _RESPONSE_PARAMETERS)


def _translate_tool_path(name: str, paths: Sequence[str]) -> str:
    """Convert a path in the chat's tools to the path in the original request.

    Return any other path unchanged.
    """
    match = TOOL_PATH.fullmatch(name)
    if match is None:
        return name
    return f"{paths[int(match[1])]}.{match[2]}"
