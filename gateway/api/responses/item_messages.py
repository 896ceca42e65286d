"""Items of a conversation to the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from gateway.api.custom_tools import input_to_arguments
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
from gateway.api.turns import BETWEEN, Turn, check_result, turn_of
from gateway.api.validation import show_value
from gateway.errors import UnsupportedParameter

SEARCH = "tool_search"
"""The name of a tool search to the model, and the id of a call that the server executed."""
FlatName = Callable[[str | None, str], str]
"""Gives the model's name for a tool, by its namespace and its name there."""


def build_chat_messages(
    instructions: str | None, items: Sequence[Item], flat: FlatName, before: int = 0
) -> list[dict[str, Any]]:
    """Return chat messages: what an assistant thinks, says and calls in a row is one message.

    Raises UnsupportedParameter for what is no text, by its place in `input`.

    Args:
        flat: names the tools that were called.
        before: how many of the items come before those of the request's `input`.
    """
    turns: list[Turn] = []
    if instructions:
        turns.append(Turn("system", [instructions]))
    for number, item in enumerate(items):
        _append_item(turns, item, flat, f"input[{number - before}]")
    return [turn.message() for turn in turns]


def _append_item(turns: list[Turn], item: Item, flat: FlatName, where: str) -> None:
    if isinstance(item, MessageItem):
        # Templates know the older name of a developer, and most take one such message.
        role = "system" if item.role == "developer" else item.role
        turn_of(turns, role).texts.append(join_text(item.content, f"{where}.content"))
    elif isinstance(item, CallOutputItem):
        text = join_text(item.output, f"{where}.output")
        turns.append(Turn("tool", [text], answers=item.call_id))
    elif isinstance(item, ReasoningItem):
        if item.text:
            turn_of(turns, "assistant").thoughts.append(item.text)
    elif isinstance(item, FunctionCallItem):
        name = flat(item.namespace, item.name)
        turn_of(turns, "assistant").call(item.call_id, name, item.arguments)
    elif isinstance(item, CustomCallItem):
        name = flat(item.namespace, item.name)
        turn_of(turns, "assistant").call(item.call_id, name, input_to_arguments(item.input))
    elif isinstance(item, SearchCallItem):
        arguments = item.arguments
        if not isinstance(arguments, str):
            arguments = orjson.dumps(arguments or {}).decode()
        turn_of(turns, "assistant").call(item.call_id or SEARCH, SEARCH, arguments)
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
    """Return the model's names for tools, without those that no client runs."""
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
    """Yield the tools that items bring, with the items' paths; `before` as in `chat_messages`."""
    for number, item in enumerate(items, -before):
        # The cheaper test comes first: `isinstance` of pydantic classes is slow.
        if item.type in _TYPES_WITH_TOOLS and isinstance(
            item, SearchOutputItem | AdditionalToolsItem
        ):
            yield f"input[{number}]" if number >= 0 else "conversation", item.tools


def check_outputs(items: Sequence[Item], before: int = 0) -> None:
    """Raises InvalidRequest for the output of a call that does not come before it.

    `before` as in `chat_messages`; what is wrong with those is wrong with their conversation.
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
    """The text of parts that may be nothing else. Raises UnsupportedParameter."""
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
