"""Requests of the Messages API, and the chat requests that they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from gateway.api.anthropic.blocks import Message, TextBlocks, chat_messages, text_of
from gateway.api.field_types import StopStrings, Whole
from gateway.api.messages import FunctionName, Lenient, Strict
from gateway.api.parameters import Parsed, sort_fields, uncallable_tools, validate
from gateway.api.schemas import ChatCompletionRequest
from gateway.api.strict_json import load_object
from gateway.api.validation import invalid_request, renamed
from gateway.errors import InvalidRequest, UnsupportedParameter

_SERVED_TOOLS = (None, "custom")

_WRITTEN: dict[str, str] = {
    "chat_template_kwargs.enable_thinking": "thinking",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""What a chat's parameters are called here, where that differs."""
_OF_TOOL = re.compile(r"tools\[(\d+)\]\.function\.(\w+)")
_TAGGED = frozenset({"content", "system"})
"""Lists of blocks: within one, pydantic names the type beside the place."""


class Tool(Lenient):
    """One that the client runs. `type` of any other names a tool that Anthropic runs or knows."""

    type: str | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: str | None = Field(None, max_length=32)
    format: OutputFormat | None = None


class Prompt(Strict):
    """What a model reads: of a request for an answer, and of one for the number of its tokens.

    `cache_control` asks for nothing that the engine does not do by itself.
    """

    model: str
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=2048)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    # Wishes that this server has nothing to do with.
    context_management: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None
    # What would have an effect, and is not served.
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    def chat(self) -> dict[str, Any]:
        """The fields of a chat request. Raises UnsupportedParameter and InvalidRequest."""
        messages = chat_messages(text_of(self.system, "system"), self.messages)
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
        if self.tools:
            chat["tools"] = [_function(tool, n) for n, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            chat |= _choice(self.tool_choice)
        if self.thinking is not None and self.thinking.type != "adaptive":
            thinks = self.thinking.type != "disabled"
            chat["chat_template_kwargs"] = {"enable_thinking": thinks}
        if self.thinking is not None and self.thinking.display == "omitted":
            chat["omit_thinking"] = True
        return chat | _output(self.output_config)

    @property
    def hints(self) -> Iterator[str]:
        """What is accepted and means nothing here."""
        if self.context_management:
            yield "context_management"
        if self.speed == "fast":
            yield "speed"
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            yield "thinking.budget_tokens"


class MessagesRequest(Prompt):
    max_tokens: Whole = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: Whole | None = Field(None, ge=-1, le=1024)
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    # Without effect on the answer.
    metadata: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    betas: list[str] | None = None
    billing_policy: dict[str, Any] | None = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    service_tier: str | None = None
    diagnostics: dict[str, Any] | None = None
    # What would have an effect, and is not served.
    container: None = None
    inference_geo: None = None

    def chat(self) -> dict[str, Any]:
        chat = super().chat() | {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": bool(self.stream),
        }
        if self.stream:
            chat["stream_options"] = {"include_usage": True}
        return chat


class Chat(ChatCompletionRequest):
    """A chat, of which an answer may leave out the thoughts."""

    omit_thinking: bool = False


def parse(
    model: type[Prompt], body: bytes, *, strict: bool = False, refuse_unknown: bool = False
) -> Parsed[Chat]:
    """Validate a JSON body. `strict` refuses hints, `refuse_unknown` names that no table has.

    Raises InvalidRequest or UnsupportedParameter naming the parameter.
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
        wanted, nested = validate(model, given.served, refuse_unknown=refuse_unknown)
    except ValidationError as error:
        raise invalid_request(error, tagged=_TAGGED) from None
    unknown = (*given.unknown, *nested)
    fields = {name: value for name, value in wanted.chat().items() if value is not None}
    try:
        chat = Chat.model_validate(fields)
    except ValidationError as error:
        raise as_written(invalid_request(error)) from None
    hints = [*given.hints, *wanted.hints]
    if chat.strict_unenforced:
        hints.append("tools.strict")
    if strict and hints:
        raise UnsupportedParameter(f"{hints[0]} is not supported by this server.", param=hints[0])
    hints += uncallable_tools(chat, strict=strict)
    return Parsed(chat, (*hints, *unknown), unknown)


def as_written(error: InvalidRequest) -> InvalidRequest:
    """Names the parameter as the client wrote it, where a chat calls it otherwise."""
    names, param = _WRITTEN, error.param or ""
    if found := _OF_TOOL.fullmatch(param):
        field = "input_schema" if found[2] == "parameters" else found[2]
        names = names | {param: f"tools.{found[1]}.{field}"}
    return renamed(error, names)


def _function(tool: Tool, number: int) -> dict[str, Any]:
    if tool.type not in _SERVED_TOOLS:
        raise UnsupportedParameter(
            f"tools.{number}.type: {tool.type!r} is not supported by this server; allowed: custom, "
            "a tool with an input_schema that the client runs.",
            param=f"tools.{number}.type",
        )
    if tool.input_schema is None:
        where = f"tools.{number}.input_schema"
        raise InvalidRequest(f"{where}: Field required.", param=where)
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if (choice.name is None) is (choice.type == "tool"):
        raise InvalidRequest(
            "tool_choice.name: goes with the type `tool`, which needs it.", param="tool_choice.name"
        )
    chosen: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen["tool_choice"] = "required" if choice.type == "any" else choice.type
    return chosen


def _output(config: OutputConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    output: dict[str, Any] = {"reasoning_effort": config.effort}
    if config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_, "strict": True}
        output["response_format"] = {"type": "json_schema", "json_schema": schema}
    return output
