"""pydantic models that describe the Messages API's responses in the OpenAPI document.

No response is built from these models. The module `answers` writes the responses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.api.answer_schemas import Continued, Described

Count = Annotated[int, Field(ge=0)]
_StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(Described):
    type: Literal["text"]
    text: str


class ThinkingBlock(Described):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Described):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Described):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class Message(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: _StopReason
    stop_sequence: str | None
    usage: MessageUsage
    continued: Continued = True


class StreamEvent(Described):
    """An SSE event of a streamed message.

    A stream begins with `message_start`. The events of a content block are `content_block_start`,
    `content_block_delta` and `content_block_stop`. `message_delta` follows the last block and has
    the stop reason and the usage. `message_stop` ends the stream. `ping` and `error` may come at
    any time.
    """

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class TokenCount(Described):
    input_tokens: Count


class MessageErrorDetail(Described):
    type: str
    message: Annotated[str, Field(min_length=1)]


class MessageError(Described):
    type: Literal["error"]
    error: MessageErrorDetail
