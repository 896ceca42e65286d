"""Conversion of conversation items to chat messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from gateway.api.openai.custom_tools import input_to_arguments
from gateway.api.openai.turns import BETWEEN, Turn, check_result, get_or_add_turn
from gateway.api.responses.items import (
    AdditionalToolsItem,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    ItemText,
    MessageItem,
    ReasoningItem,
    SearchCallItem,
    SearchOutputItem,
)
from gateway.api.responses.other_objects import OtherObject
from gateway.api.responses.tools import NamespaceTool, Tool
from gateway.api.validation import show_value
from gateway.errors import UnsupportedParameter

SEARCH = "tool_search"
"""Name of the tool with which the model searches for other tools. The prompt uses this name.

If a call of this tool has no `call_id`, the call's id in the chat is also this text.
"""
FlatName = Callable[[str | None, str], str]
"""Function that returns the name that a tool has in the prompt.

The first argument is the tool's namespace; None for no namespace. The second argument is the tool's
name in the namespace.
"""


def build_chat_messages(
    instructions: str | None, items: Sequence[Item], flat: FlatName, before: int = 0
) -> list[dict[str, Any]]:
    """Return the chat messages for the items of a conversation.

    Consecutive reasoning, text and calls of an assistant become one message.

    Args:
        instructions: The text of a leading system message; None or "" for no such message.
        items: The items of the conversation.
        flat: Returns a tool's name in the prompt.
        before: The number of leading items that are not in the request's `input`.

    Raises:
        UnsupportedParameter: An item is not text; the error names its index in `input`.
    """
    turns: list[Turn] = []
    if instructions:
        turns.append(Turn("system", [instructions]))
    for number, item in enumerate(items):
        _append_item(turns, item, flat, f"input[{number - before}]")
    return [turn.to_message() for turn in turns]


def _append_item(turns: list[Turn], item: Item, flat: FlatName, where: str) -> None:
    if isinstance(item, MessageItem):
        # Send `developer` as `system`: templates only know this older name. Merge consecutive
        # system items: most templates accept only one system message.
        role = "system" if item.role == "developer" else item.role
        get_or_add_turn(turns, role).texts.append(join_text(item.content, f"{where}.content"))
    elif isinstance(item, CallOutputItem):
        text = join_text(item.output, f"{where}.output")
        turns.append(Turn("tool", [text], answers=item.call_id))
    elif isinstance(item, ReasoningItem):
        if item.text:
            get_or_add_turn(turns, "assistant").thoughts.append(item.text)
    elif isinstance(item, FunctionCallItem):
        name = flat(item.namespace, item.name)
        get_or_add_turn(turns, "assistant").add_call(item.call_id, name, item.arguments)
    elif isinstance(item, CustomCallItem):
        name = flat(item.namespace, item.name)
        get_or_add_turn(turns, "assistant").add_call(
            item.call_id, name, input_to_arguments(item.input)
        )
    elif isinstance(item, SearchCallItem):
        arguments = item.arguments
        if not isinstance(arguments, str):
            arguments = orjson.dumps(arguments or {}).decode()
        get_or_add_turn(turns, "assistant").add_call(item.call_id or SEARCH, SEARCH, arguments)
    elif isinstance(item, SearchOutputItem):
        found = _list_model_names(item.tools, flat)
        text = "Tools that can be called now: " + ", ".join(found) if found else "No tools found."
        turns.append(Turn("tool", [text], answers=item.call_id or SEARCH))
    elif not isinstance(item, AdditionalToolsItem):
        raise UnsupportedParameter(
            f"{where}: an item of type {show_value(item.type)} is not supported by this server.",
            param=where,
        )


def _list_model_names(tools: Sequence[Tool], flat: FlatName) -> list[str]:
    """Return the names that the prompt uses for the client's tools.

    Hosted tools are left out, because the client cannot run them.
    """
    names = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            own = [member for member in tool.tools if not isinstance(member, OtherObject)]
            names += [flat(tool.name, member.name) for member in own]
        elif not isinstance(tool, OtherObject):
            names.append(tool.name)
    return names


_TYPES_WITH_TOOLS = ("tool_search_output", "additional_tools")


def find_item_tools(items: Sequence[Item], before: int = 0) -> Iterator[tuple[str, Sequence[Tool]]]:
    """Yield the path and the tools of each item that contains tools.

    `before` is the number of leading items that are not in the request's `input`.
    """
    for number, item in enumerate(items, -before):
        # Test the type string first: `isinstance` with pydantic classes is slow.
        if item.type in _TYPES_WITH_TOOLS and isinstance(
            item, SearchOutputItem | AdditionalToolsItem
        ):
            yield f"input[{number}]" if number >= 0 else "conversation", item.tools


def check_outputs(items: Sequence[Item], before: int = 0) -> None:
    """Raise InvalidRequest for a call output without an earlier call.

    `before` is the number of leading items that are not in the request's `input`. Errors about
    these items name `conversation` as the parameter.
    """
    calls = set()
    for number, item in enumerate(items, -before):
        if isinstance(item, FunctionCallItem | CustomCallItem | SearchCallItem):
            calls.add(item.call_id)
        elif isinstance(item, CallOutputItem | SearchOutputItem):
            where = f"input[{number}].call_id" if number >= 0 else "conversation"
            call = "search without a call_id" if item.call_id is None else "call"
            check_result(item.call_id, calls, where, call, "output")


def join_text(content: str | Sequence[ItemText | OtherObject], where: str) -> str:
    """Return the joined text of parts. Raise UnsupportedParameter for a part that is not text."""
    if isinstance(content, str):
        return content
    return BETWEEN.join([_part_text(part, f"{where}[{n}]") for n, part in enumerate(content)])


def _part_text(part: ItemText | OtherObject, where: str) -> str:
    if isinstance(part, OtherObject):
        raise UnsupportedParameter(
            f"{where}: found a part of type {show_value(part.type)}; this server takes text only.",
            param=where,
        )
    return part.text
