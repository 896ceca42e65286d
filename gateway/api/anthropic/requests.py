"""Requests of the Messages API, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from gateway.api.anthropic.blocks import (
    UNSERVED,
    Message,
    TextBlocks,
    join_system_text,
    to_chat_messages,
)
from gateway.api.anthropic.tools import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    check_demand,
    select_hosted_tools,
    select_own_tools,
    to_chat_choice,
    to_function,
)
from gateway.api.field_types import JsonInt, StopStrings
from gateway.api.hosted_tools import name_hosted
from gateway.api.openai import chat_tools
from gateway.api.openai.messages import Strict
from gateway.api.openai.parameters import Parsed, check_hints, sort_fields, validate
from gateway.api.openai.schemas import TOOL_PATH, ChatCompletionRequest
from gateway.api.strict_json import load_object
from gateway.api.successors import OF_MESSAGES
from gateway.api.validation import build_invalid_request, join_dotted, rename_parameters
from gateway.errors import InvalidRequest

_CLIENT_NAMES: dict[str, str] = {
    "chat_template_kwargs.enable_thinking": "thinking",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Chat parameters that the Messages API names differently, each with its name in that API."""
_TAGGED = frozenset({"content", "system"})
"""Fields whose values are lists of content blocks.

If a block is invalid, pydantic inserts the block's type into the error's path, after the block's
index. For these fields, `build_invalid_request` removes the type from the path.
"""


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: JsonInt | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: str | None = Field(None, max_length=32)
    format: OutputFormat | None = None


class Prompt(Strict):
    """The fields from which the prompt is built.

    Requests for an answer and requests for a token count share these fields. `cache_control` has no
    effect, because the engine caches every prompt.
    """

    successors = OF_MESSAGES

    model: str
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=2048)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of `output_config.format`, from Anthropic's beta version."""
    cache_control: dict[str, Any] | None = None
    # These fields do not apply to this server. They are accepted and reported as ignored.
    context_management: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None
    # Only an empty list is accepted: MCP servers would affect the answer.
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    def to_chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat request.

        Raise UnsupportedParameter and InvalidRequest for fields that cannot be converted.
        """
        own = select_own_tools(self.tools) if self.tools else []
        names = {tool.name or "" for _, tool in own} if own else frozenset()
        messages = to_chat_messages(join_system_text(self.system), self.messages, names)
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        if not messages:
            raise InvalidRequest("messages: none of them says anything.", param="messages")
        last = messages[-1]
        if last["role"] == "assistant":
            if last.get("tool_calls") or not last["content"]:
                raise InvalidRequest(
                    "messages: the last one must be the user's, or begin the answer with text.",
                    param="messages",
                )
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if own:
            chat["tools"] = [to_function(tool, n) for n, tool in own]
            chat["tool_positions"] = tuple([n for n, _ in own])
        if self.tool_choice is not None:
            check_demand(self.tool_choice, self.tools or (), names)
            chat |= to_chat_choice(self.tool_choice)
        if self.thinking is not None and self.thinking.type != "adaptive":
            thinks = self.thinking.type != "disabled"
            chat["chat_template_kwargs"] = {"enable_thinking": thinks}
        if self.thinking is not None and self.thinking.display == "omitted":
            chat["omit_thinking"] = True
        return chat | self._build_output_fields()

    def _build_output_fields(self) -> dict[str, Any]:
        """Return the chat request's fields for reasoning effort and output format.

        Raise InvalidRequest if `output_format` and `output_config.format` differ.
        """
        output: dict[str, Any] = {}
        format_, name = self.output_format, "output_format"
        if self.output_config is not None:
            output["reasoning_effort"] = self.output_config.effort
            if (newer := self.output_config.format) is not None:
                if format_ not in (None, newer):
                    raise InvalidRequest(
                        f"{name}: found another format than output_config.format; leave out one.",
                        param=name,
                    )
                format_, name = newer, "output_config.format"
        if format_ is not None:
            schema = {"name": "output", "schema": format_.schema_, "strict": True}
            output["response_format"] = {"type": "json_schema", "json_schema": schema}
            output["format_path"] = name
        return output

    @property
    def hints(self) -> Iterator[str]:
        """The names of parameters that are accepted without effect."""
        if self.tools and (self.tool_choice is None or self.tool_choice.type != "none"):
            yield from name_hosted(select_hosted_tools(self.tools))
        if self.context_management:
            yield "context_management"
        if self.speed == "fast":
            yield "speed"
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            yield "thinking.budget_tokens"


class MessagesRequest(Prompt):
    max_tokens: JsonInt = Field(ge=0)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: JsonInt | None = Field(None, ge=-1, le=1024)
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    # These fields have no effect on the answer.
    metadata: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    betas: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    billing_policy: dict[str, Any] | None = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    service_tier: str | None = None
    diagnostics: dict[str, Any] | None = None
    # Only null is accepted: any other value would affect the answer.
    container: None = None
    inference_geo: None = None

    def to_chat(self) -> dict[str, Any]:
        chat = super().to_chat() | {
            "max_tokens": self.max_tokens or 1,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": bool(self.stream),
        }
        if self.max_tokens == 0:
            chat["without_output"] = True
        if self.stream:
            chat["stream_options"] = {"include_usage": True}
        return chat


class MessagesChat(ChatCompletionRequest):
    """A chat request that was converted from an Anthropic request.

    Its additional fields say where the parameters are in the client's request, and what must be
    left out of the answer.
    """

    tools: Annotated[list[chat_tools.Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_positions: tuple[int, ...] = ()
    """For each of `tools`, the tool's index in the client's list.

    The client's list may also contain hosted tools, which `tools` does not contain.
    """
    format_path: str = ""
    """The path of the parameter in which the client set the output format: `output_format` or
    `output_config.format`."""
    omit_thinking: bool = False
    without_output: bool = False

    def _check_tool_messages(self) -> None:
        """Do nothing, because the module `blocks` has already checked the tool results.

        Errors of `blocks` name the faulty block in the client's request.
        """

    def describe_path(self, path: str) -> str:
        if path == "response_format":
            return self.format_path
        found = TOOL_PATH.fullmatch(path)
        return path if found is None else f"tools.{self.tool_positions[int(found[1])]}.input_schema"


def parse(
    model: type[Prompt], body: bytes, *, strict: bool = False, refuse_unknown: bool = False
) -> Parsed[MessagesChat]:
    """Validate a JSON body and convert it to a chat request.

    `refuse_unknown` refuses parameters with unknown names. `strict` also refuses known parameters
    that have no effect here. Raise InvalidRequest for a malformed or unknown parameter. Raise
    UnsupportedParameter for a parameter that this server does not support. Both errors name the
    parameter.
    """
    refuse_unknown = strict or refuse_unknown
    given = sort_fields(
        model,
        load_object(body or b"{}"),
        strict=strict,
        refuse_unknown=refuse_unknown,
        without_effect=() if model is MessagesRequest else MessagesRequest.model_fields.keys(),
    )
    try:
        wanted, nested = validate(
            model, given.served, refuse_unknown=refuse_unknown, write_path=join_dotted
        )
    except ValidationError as error:
        raise build_invalid_request(error, tagged=_TAGGED, unserved=UNSERVED) from None
    unknown = (*given.unknown, *nested)
    fields = {name: value for name, value in wanted.to_chat().items() if value is not None}
    try:
        chat = MessagesChat.model_validate(fields)
    except ValidationError as error:
        raise restore_client_name(build_invalid_request(error)) from None
    hints = [*given.hints, *wanted.hints]
    if chat.tools or hints:
        check_hints(chat, hints, strict=strict)
    return Parsed(chat, (*hints, *given.uncounted, *unknown), unknown)


def restore_client_name(error: InvalidRequest) -> InvalidRequest:
    """Convert an error about a chat request to an error about the Messages API request.

    In the returned error, the chat parameter has its name in the Messages API.
    """
    return rename_parameters(error, _CLIENT_NAMES)
