"""Requests of the Responses API and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from gateway.api.field_types import Int64, JsonInt, StopString, StopStrings
from gateway.api.openai.messages import MAX_MESSAGES, Strict
from gateway.api.responses.item_messages import build_chat_messages, find_item_tools
from gateway.api.responses.items import Item, ItemReference, MessageItem
from gateway.api.responses.options import (
    CacheOptions,
    Conversation,
    ConversationRef,
    Include,
    Label,
    Metadata,
    Reasoning,
    ResponseStreamOptions,
    TextOptions,
)
from gateway.api.responses.tools import ToolChoice, Tools
from gateway.api.responses.toolset import NO_TOOLS, Toolset
from gateway.api.successors import OF_RESPONSES
from gateway.errors import InvalidRequest

_MAX_ECHO_BYTES = 256 * 1024
"""Size in bytes above which a response does not repeat the request's long fields. Instructions of
about 60,000 tokens fit."""


class ResponsePrompt(Strict):
    """The fields from which the prompt is built.

    Requests for an answer and requests for a token count share these fields.
    """

    successors = OF_RESPONSES

    model: str | None = None
    input: str | Annotated[list[Item], Field(fail_fast=True, max_length=8192)] | None = None
    instructions: str | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # These fields are accepted only if the gateway stores responses.
    previous_response_id: str | None = None
    conversation: Conversation | None = None

    @cached_property
    def items(self) -> Sequence[Item]:
        """The request's new items, always as a list."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input or []

    @property
    def conversation_id(self) -> str | None:
        named = self.conversation
        return named.id if isinstance(named, ConversationRef) else named

    @property
    def continues(self) -> bool:
        """True if the request refers to stored responses, conversations or items."""
        return (
            self.previous_response_id is not None
            or self.conversation is not None
            or any(isinstance(item, ItemReference) for item in self.items)
        )

    def build_chat_fields(self, items: Sequence[Item], *, complete: bool = True) -> dict[str, Any]:
        """Return the fields of the chat request that consists of `items`.

        `items` are earlier items, followed by the request's own items. `complete` is False while
        earlier items are not loaded yet. Raise UnsupportedParameter or InvalidRequest if the items
        or tools cannot be converted.
        """
        if not items:
            found = (
                "You must provide the parameter input."
                if self.input is None
                else "input: found []."
            )
            raise InvalidRequest(f"{found} Send a text, or an array of items.", param="input")
        before = len(items) - len(self.items)
        item_tools = [*find_item_tools(items, before)]
        toolset = Toolset.of(self.tools or (), item_tools) if self.tools or item_tools else NO_TOOLS
        messages = build_chat_messages(self.instructions, items, toolset.flatten_name, before)
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"input: with all that comes before it there are {len(messages)} messages; "
                f"allowed: {MAX_MESSAGES}.",
                param="input",
            )
        chat: dict[str, Any] = {"model": self.model or "", "messages": messages}
        if toolset is not NO_TOOLS:
            if offered := toolset.select_callable(self.tool_choice, complete=complete):
                chat["tools"] = toolset.build_functions(offered)
                chat["tool_paths"] = tuple([each.where for each in offered])
                if self.tool_choice != "none":
                    chat["called_tools"] = toolset.map_calls(offered)
            if self.tool_choice != "none":
                chat["tool_hints"] = toolset.list_hints()
        if self.tool_choice is not None:
            chat["tool_choice"] = toolset.to_chat_choice(self.tool_choice, complete=complete)
        chat["parallel_tool_calls"] = self.parallel_tool_calls
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = self.text.format.for_chat()
        return chat

    def build_echo(self) -> bytes:
        """Return the request's fields that the response repeats, as a JSON object.

        This base class returns b"": a request for a token count has no response that repeats its
        fields.
        """
        return b""

    @property
    def hints(self) -> Iterator[str]:
        """Names of accepted parameters that have no effect."""
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            yield "text.verbosity"
        if self.reasoning is not None and self.reasoning.context not in (None, "auto"):
            yield "reasoning.context"


class InputTokensRequest(ResponsePrompt):
    personality: str | None = None

    @property
    def hints(self) -> Iterator[str]:
        yield from super().hints
        if self.personality is not None:
            yield "personality"


class ResponseRequest(ResponsePrompt):
    model: str
    max_output_tokens: Int64 | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_logprobs: JsonInt | None = Field(None, ge=0, le=20)
    include: Annotated[list[Include], Field(fail_fast=True, max_length=32)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    # Extensions sent by vLLM's clients.
    top_k: JsonInt | None = Field(None, ge=-1, le=1024)
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, allow_inf_nan=False)
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # These fields have no effect on the answer.
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: CacheOptions | None = None
    service_tier: Label | None = None
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: Int64 | None = Field(None, ge=1)
    # These fields are accepted and reported as ignored: this server has no such features.
    context_management: list[Any] | None = None
    background_options: dict[str, Any] | None = None
    access_programs: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    # For these fields, true is accepted only if the gateway stores responses.
    store: bool | None = None
    background: bool | None = None
    # Only null is accepted: any other value would affect the answer, and is not supported.
    prompt: None = None
    moderation: None = None

    def build_chat_fields(self, items: Sequence[Item], *, complete: bool = True) -> dict[str, Any]:
        chat = super().build_chat_fields(items, complete=complete) | {
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "chat_template_kwargs": self.chat_template_kwargs,
            "stream": bool(self.stream),
        }
        if self.stream:
            chat["stream_options"] = {"include_usage": True}
        if self.top_logprobs or self.includes("message.output_text.logprobs"):
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return chat

    @property
    def hints(self) -> Iterator[str]:
        yield from super().hints
        for name in ("context_management", "background_options", "access_programs", "image"):
            if getattr(self, name):
                yield name

    def includes(self, what: Include) -> bool:
        return what in (self.include or ())

    @property
    def wants_summary(self) -> bool:
        """True if the reasoning is also to be returned as a summary."""
        reasoning = self.reasoning
        return reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)

    def build_echo(self) -> bytes:
        """Return the request's fields that the response repeats, with OpenAI's defaults, as JSON.

        The JSON is sent several times and stays in memory until the answer ends. If it exceeds
        `_MAX_ECHO_BYTES`, the long fields that the client wrote are left out.
        """
        reasoning, text = self.reasoning, self.text
        form = text.format if text is not None else None
        fields: dict[str, Any] = {
            "model": self.model,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_retention": self.prompt_cache_retention,
            "reasoning": {
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and (reasoning.summary or reasoning.generate_summary),
            },
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
        verbosity = (text and text.verbosity) or "medium"
        long = {
            "instructions": self.instructions,
            "text": {
                "format": form.to_json() if form else {"type": "text"},
                "verbosity": verbosity,
            },
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
        }
        # `default=dict` writes the same JSON as `model_dump`, which would copy all schemas. A copy
        # takes 0.2 s for a large request.
        echo = orjson.dumps(fields | long, default=dict)
        if len(echo) <= _MAX_ECHO_BYTES:
            return echo
        short: dict[str, Any] = {
            "instructions": None,
            "text": {"format": {"type": form.type if form else "text"}, "verbosity": verbosity},
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else "auto",
            "tools": [],
        }
        return orjson.dumps(fields | short)
