"""Content blocks of Messages API requests, and their conversion to chat messages.

Reference: Anthropic API, "Create a Message" (2026), and the types of its Python package.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import Field

from gateway.api.openai.messages import Lenient
from gateway.api.openai.turns import BETWEEN, Turn, check_result, get_or_add_turn
from gateway.api.validation import show_value
from gateway.errors import InvalidRequest, UnsupportedParameter

_FAILED = "Error: "
_CLIENT_FACTS = "x-anthropic-billing-header:"


class _Text(Lenient):
    type: Literal["text"]
    text: str


class _Thinking(Lenient):
    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(Lenient):
    """Encrypted thinking that another server wrote. This server ignores the block."""

    type: Literal["redacted_thinking"]


class _ToolUse(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Unserved(Lenient):
    """A block that is not text, such as an image. A request with such a block is refused."""

    type: Literal[
        "image",
        "document",
        "search_result",
        "container_upload",
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


UNSERVED = frozenset(get_args(Unserved.model_fields["type"].annotation))


class _ToolReference(Lenient):
    """Reference to a tool that a tool search found. The request's `tools` define the tool."""

    type: Literal["tool_reference"]
    tool_name: str


_TextBlock = Annotated[_Text | Unserved, Field(discriminator="type")]
TextBlocks = Annotated[list[_TextBlock], Field(fail_fast=True)]
_ResultBlock = Annotated[_Text | _ToolReference | Unserved, Field(discriminator="type")]


class _ToolResult(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_ResultBlock], Field(fail_fast=True)] | None = None
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
"""For each of these block types, the only role whose messages may contain such blocks.

Messages of any role may contain blocks of all other types.
"""


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(fail_fast=True)]


def join_system_text(system: str | Sequence[_Text | Unserved] | None) -> str:
    """Return the text of a system prompt. Raise UnsupportedParameter for a block that is not text.

    Claude Code begins the system prompt with a block of facts about the client, which differ in
    each request. This block is left out: otherwise no two requests would share a prefix in the
    engine's KV cache.
    """
    if system is None or isinstance(system, str):
        return system or ""
    return BETWEEN.join(
        [
            _get_text(block, f"system.{n}")
            for n, block in enumerate(system)
            if not (isinstance(block, _Text) and block.text.startswith(_CLIENT_FACTS))
        ]
    )


def _join_result_text(result: _ToolResult, where: str, tools: Collection[str]) -> str:
    """Return the text of a tool's result. Raise UnsupportedParameter for a block without text."""
    content = result.content
    if not isinstance(content, str):
        content = BETWEEN.join(
            [
                _describe_reference(block, f"{where}.{n}", tools)
                for n, block in enumerate(content or ())
            ]
        )
    return _FAILED + content if result.is_error else content


def _describe_reference(
    block: _Text | _ToolReference | Unserved, where: str, tools: Collection[str]
) -> str:
    if not isinstance(block, _ToolReference):
        return _get_text(block, where)
    # Accept references to tools that the request does not have: a client whose MCP server is gone
    # still sends such references. Refusing them would end the conversation.
    can = "can" if block.tool_name in tools else "cannot"
    return f"The tool {block.tool_name} {can} be called now."


def _get_text(block: _Text | Unserved, where: str) -> str:
    if isinstance(block, Unserved):
        raise UnsupportedParameter(
            f"{where}: found a block of type {show_value(block.type)}; this server takes "
            "text only.",
            param=where,
        )
    return block.text


def to_chat_messages(
    system: str, messages: Sequence[Message], tools: Collection[str]
) -> list[dict[str, Any]]:
    """Convert Anthropic's messages to chat messages.

    Each tool result becomes a separate chat message. Apart from tool results, consecutive messages
    of one role become one chat message. Anthropic merges such messages, too, and many chat
    templates refuse two consecutive messages of one role.

    Args:
        system: the text of the system prompt.
        messages: the messages.
        tools: the names of the request's tools.

    Raises:
        UnsupportedParameter: A block is not text.
        InvalidRequest: A message has a block that is not allowed for its role, or a tool result has
            no call before it.
    """
    turns: list[Turn] = []
    calls: set[str] = set()
    if system:
        turns.append(Turn("system", [system]))
    for number, message in enumerate(messages):
        _add_message(turns, message, f"messages.{number}.content", calls, tools)
    return [turn.to_message() for turn in turns]


def _add_message(
    turns: list[Turn], message: Message, where: str, calls: set[str], tools: Collection[str]
) -> None:
    """Add a message to `turns`, and the ids of its tool calls to `calls`."""
    if isinstance(message.content, str):
        get_or_add_turn(turns, message.role).texts.append(message.content)
        return
    for number, block in enumerate(message.content):
        path = f"{where}.{number}"
        owner = _OWNERS.get(type(block), message.role)
        if owner != message.role:
            raise InvalidRequest(
                f"{path}: a block of type {show_value(block.type)} is the {owner}'s.", param=path
            )
        if isinstance(block, _RedactedThinking):
            continue
        if isinstance(block, _ToolResult):
            check_result(block.tool_use_id, calls, f"{path}.tool_use_id", "tool_use", "result")
            text = _join_result_text(block, f"{path}.content", tools)
            turns.append(Turn("tool", [text], answers=block.tool_use_id))
            continue
        turn = get_or_add_turn(turns, message.role)
        if isinstance(block, _ToolUse):
            arguments = orjson.dumps(block.input).decode()
            turn.add_call(block.id, block.name, arguments)
            calls.add(block.id)
        elif isinstance(block, _Thinking):
            turn.thoughts.append(block.thinking)
        else:
            turn.texts.append(_get_text(block, path))
