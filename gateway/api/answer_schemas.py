"""pydantic models of this server's responses, for the OpenAPI document.

Most of these models are never instantiated: the modules named `answers` write the responses as
bytes, and the error handlers write the errors. Each model has the members that clients may rely on.
A member with a default may be missing from a response.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.openai.usage import Usage

Count = Annotated[int, Field(ge=0)]
_Finish = Literal["stop", "length", "tool_calls"]


class Described(BaseModel):
    """Base class of models for the OpenAPI document. pydantic builds each model on first use."""

    model_config = ConfigDict(defer_build=True)


class AnswerModel(Described):
    """Base class of models that responses are serialized from. All members are always sent.

    So the OpenAPI document lists members with defaults as required, too.
    """

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class ErrorDetail(Described):
    message: Annotated[str, Field(min_length=1)]
    type: Literal["invalid_request_error", "server_error", "requests", "tokens"]
    param: Annotated[str | None, Field(description="The parameter that is at fault.")]
    code: Annotated[str | None, Field(description="A stable word for programs.")]


class Error(Described):
    error: ErrorDetail


class TroubleState(Described):
    """A current problem: its text, start time and number of occurrences."""

    model_config = ConfigDict(extra="forbid")

    level: Literal["warning", "error", "critical"]
    text: str
    since: float
    times: Count | None = None
    last: str | None = None


class _Generated(Described):
    id: str
    created: Count
    model: str
    system_fingerprint: str | None


Continued = Annotated[
    Literal[True],
    Field(description="Sampled by two replicas, as the first failed; otherwise absent."),
]


class _Choice(Described):
    index: Count
    logprobs: dict[str, Any] | None
    finish_reason: _Finish
    continued: Continued = True


class _ChunkChoice(Described):
    index: Count
    logprobs: dict[str, Any] | None
    finish_reason: _Finish | None
    continued: Continued = True


class CalledFunction(Described):
    name: str
    arguments: str


class CalledTool(Described):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledInput(Described):
    name: str
    input: str


class CalledCustomTool(Described):
    id: str
    type: Literal["custom"]
    custom: CalledInput


class AssistantMessage(Described):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str = ""
    tool_calls: Annotated[list[CalledTool | CalledCustomTool], Field(min_length=1)] = []


class ChatChoice(_Choice):
    message: AssistantMessage


class ChatCompletion(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(_ChunkChoice):
    delta: dict[str, Any]


class ChatCompletionChunk(_Generated):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChoice(_Choice):
    text: str


class Completion(_Generated):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(_ChunkChoice):
    text: str


class CompletionChunk(_Generated):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
