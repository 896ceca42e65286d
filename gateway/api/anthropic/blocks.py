"""Content blocks as clients send them, and the chat messages that they are.

Reference: Anthropic API, "Create a Message" (2026), and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from gateway.api.messages import Lenient
from gateway.api.turns import BETWEEN, Turn, turn_of
from gateway.errors import InvalidRequest, UnsupportedParameter

_FAILED = "Error: "


class _Text(Lenient):
    type: Literal["text"]
    text: str


class _Thinking(Lenient):
    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(Lenient):
    """Another server's secret, which says nothing to this model."""

    type: Literal["redacted_thinking"]


class _ToolUse(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Unserved(Lenient):
    """What is no text: it is refused by its place, and never left out."""

    type: Literal[
        "image",
        "document",
        "search_result",
        "container_upload",
        "tool_reference",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "browser_state",
        "compaction",
    ]


_TextBlock = Annotated[_Text | Unserved, Field(discriminator="type")]
TextBlocks = Annotated[list[_TextBlock], Field(fail_fast=True)]


class _ToolResult(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = None


_Block = Annotated[
    _Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult | Unserved,
    Field(discriminator="type"),
]


_OWNERS: dict[type[Lenient], str] = {
    _Thinking: "assistant",
    _RedactedThinking: "assistant",
    _ToolUse: "assistant",
    _ToolResult: "user",
}
"""Whose blocks they are; anybody's if not here."""


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(fail_fast=True)]


def text_of(content: str | Sequence[_Text | Unserved] | None, where: str) -> str:
    """The text of blocks that may be nothing else. Raises UnsupportedParameter."""
    if content is None or isinstance(content, str):
        return content or ""
    return BETWEEN.join([_text(block, f"{where}.{n}") for n, block in enumerate(content)])


def _text(block: _Text | Unserved, where: str) -> str:
    if isinstance(block, Unserved):
        raise UnsupportedParameter(
            f"{where}: found a block of type {block.type!r}; this server takes text only.",
            param=where,
        )
    return block.text


def chat_messages(system: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As OpenAI has them: what tools gave is a message each, and turns alternate.

    (Anthropic makes one turn of several messages of one side, and many templates refuse them.)
    Raises UnsupportedParameter for a block that is no text, and InvalidRequest for one that is the
    other side's.
    """
    turns: list[Turn] = []
    if system:
        turns.append(Turn("system", [system]))
    for number, message in enumerate(messages):
        _read(turns, message, f"messages.{number}.content")
    return [turn.message() for turn in turns]


def _read(turns: list[Turn], message: Message, where: str) -> None:
    if isinstance(message.content, str):
        turn_of(turns, message.role).texts.append(message.content)
        return
    for number, block in enumerate(message.content):
        place = f"{where}.{number}"
        owner = _OWNERS.get(type(block), message.role)
        if owner != message.role:
            raise InvalidRequest(
                f"{place}: a block of type {block.type!r} is the {owner}'s.", param=place
            )
        if isinstance(block, _RedactedThinking):
            continue
        if isinstance(block, _ToolResult):
            text = text_of(block.content, f"{place}.content")
            if block.is_error:
                text = _FAILED + text
            turns.append(Turn("tool", [text], answers=block.tool_use_id))
            continue
        turn = turn_of(turns, message.role)
        if isinstance(block, _ToolUse):
            arguments = orjson.dumps(block.input).decode()
            turn.call(block.id, block.name, arguments)
        elif isinstance(block, _Thinking):
            turn.thoughts.append(block.thinking)
        else:
            turn.texts.append(_text(block, place))
