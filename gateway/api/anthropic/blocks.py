"""Content blocks as clients send them, and the chat messages that they are.

Reference: Anthropic API, "Create a Message" (2026), and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from gateway.api.messages import Lenient
from gateway.errors import UnsupportedParameter

# Blocks are apart where templates know only text: glued together, the last word of one and the
# first of the next would be one word.
_BETWEEN = "\n"
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


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(fail_fast=True)]


def text_of(content: str | Sequence[_Text | Unserved] | None, where: str) -> str:
    """The text of blocks that may be nothing else. Raises UnsupportedParameter."""
    if content is None or isinstance(content, str):
        return content or ""
    return _BETWEEN.join([_text(block, f"{where}.{n}") for n, block in enumerate(content)])


def _text(block: _Text | Unserved, where: str) -> str:
    if isinstance(block, Unserved):
        raise UnsupportedParameter(
            f"{where}: found a block of type {block.type!r}; this server takes text only.",
            param=where,
        )
    return block.text


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As OpenAI has them: what tools gave is a message each, and turns alternate.

    Raises UnsupportedParameter for a block that is no text.
    """
    chat: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        for said in _said(message, f"messages.{number}.content"):
            # Anthropic makes one turn of several messages of one side, and many templates refuse
            # them.
            if chat and chat[-1]["role"] == said["role"] != "tool":
                _join(chat[-1], said)
            else:
                chat.append(said)
    return chat


def _join(turn: dict[str, Any], more: dict[str, Any]) -> None:
    for name, between in (("content", _BETWEEN), ("reasoning_content", _BETWEEN)):
        texts = [text for text in (turn.get(name), more.get(name)) if text]
        if texts:
            turn[name] = between.join(texts)
    if calls := more.get("tool_calls"):
        turn["tool_calls"] = turn.get("tool_calls", []) + calls


def _said(message: Message, where: str) -> Iterator[dict[str, Any]]:
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        if isinstance(block, _ToolResult):
            if texts:
                yield {"role": message.role, "content": _BETWEEN.join(texts)}
                texts = []
            yield _result(block, f"{where}.{number}.content")
        elif isinstance(block, _ToolUse):
            arguments = orjson.dumps(block.input).decode()
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, _Thinking):
            thoughts.append(block.thinking)
        elif not isinstance(block, _RedactedThinking):
            texts.append(_text(block, f"{where}.{number}"))
    said: dict[str, Any] = {"role": message.role, "content": _BETWEEN.join(texts)}
    if thoughts:
        said["reasoning_content"] = _BETWEEN.join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if texts or thoughts or calls or not message.content:
        yield said


def _result(block: _ToolResult, where: str) -> dict[str, Any]:
    text = text_of(block.content, where)
    if block.is_error:
        text = _FAILED + text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
