"""pydantic models that describe the Responses API's JSON in the OpenAPI document.

No response is built from these models. The module `answers` writes the responses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.api.answer_schemas import Continued, Described, Error
from gateway.api.routing import Schema, reference

Count = Annotated[int, Field(ge=0)]
_ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Described):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[dict[str, Any]]


class OutputMessage(Described):
    id: str
    type: Literal["message"]
    status: _ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ThoughtText(Described):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class OutputReasoning(Described):
    """Reasoning of the model. `summary` repeats the reasoning text if the request asked for a
    summary."""

    id: str
    type: Literal["reasoning"]
    status: _ItemStatus
    summary: list[ThoughtText]
    content: list[ThoughtText]
    encrypted_content: str | None = None


class OutputFunctionCall(Described):
    id: str
    type: Literal["function_call"]
    status: _ItemStatus
    call_id: str
    name: str
    namespace: str = ""
    arguments: str


class OutputCustomToolCall(Described):
    id: str
    type: Literal["custom_tool_call"]
    status: _ItemStatus
    call_id: str
    name: str
    namespace: str = ""
    input: str


class OutputToolSearchCall(Described):
    id: str
    type: Literal["tool_search_call"]
    status: _ItemStatus
    execution: Literal["client"]
    call_id: str
    arguments: Any


class InputDetails(Described):
    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(Described):
    reasoning_tokens: Count


class ResponseUsage(Described):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseFailure(Described):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Described):
    reason: Literal["max_output_tokens"]


class ResponseObject(Described):
    """A response. It repeats parameters of the request in OpenAI's format."""

    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[
        OutputReasoning
        | OutputMessage
        | OutputFunctionCall
        | OutputCustomToolCall
        | OutputToolSearchCall
    ]
    usage: ResponseUsage | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    continued: Continued = True
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    metadata: dict[str, str]


class ResponseEvent(Described):
    """SSE event of a streamed response.

    A stream begins with `response.created` and `response.in_progress`. The events of each item
    follow, from `response.output_item.added` to `response.output_item.done`. The last event is
    `response.completed` or `response.incomplete`. A failed stream ends with `response.failed` and
    `error`.
    """

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: Count


class InputTokens(Described):
    object: Literal["response.input_tokens"]
    input_tokens: Count


def describe_stream() -> Schema:
    """Return the OpenAPI description of a streamed response. Its schema describes one SSE event."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(ResponseEvent), reference(Error)]},
    }
    event: Schema = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return {"content": {"text/event-stream": {"schema": event}}}
