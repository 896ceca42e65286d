"""Items of a conversation as clients send them, and the chat messages that they are.

Reference: OpenAI API, "Create a model response" (2026), and the types of its Python package.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AliasChoices, Field, Tag

from gateway.api.custom_tools import input_to_arguments
from gateway.api.messages import Lenient
from gateway.api.responses.tools import NamespaceTool, Tool, Tools
from gateway.api.responses.unions import OtherObject, by_type
from gateway.api.turns import BETWEEN, Turn, turn_of
from gateway.errors import InvalidRequest, UnsupportedParameter

SEARCH = "tool_search"
"""The name of a tool search to the model, and the id of a call that the server executed."""
_OURS = "thoughts:"


def encoded(thoughts: str) -> str:
    """Thoughts as `encrypted_content`, for who sends that alone back. It keeps nothing secret."""
    return _OURS + urlsafe_b64encode(thoughts.encode()).decode()


def decoded(content: str | None) -> str:
    """The thoughts; of another server's secret, which says nothing to this model, none."""
    if content is None or not content.startswith(_OURS):
        return ""
    try:
        return urlsafe_b64decode(content.removeprefix(_OURS)).decode()
    except (binascii.Error, ValueError):
        return ""


class ItemText(Lenient):
    """`refusal` is what an assistant said when it declined: its words, all the same."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class ItemThought(Lenient):
    type: Literal["reasoning_text", "summary_text"]
    text: str


_TEXTS = ("input_text", "output_text", "text", "refusal")
Part = Annotated[
    Annotated[ItemText, Tag("[text]")] | Annotated[OtherObject, Tag("[other]")],
    by_type(dict.fromkeys(_TEXTS, "[text]")),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Thoughts = Annotated[list[ItemThought], Field(fail_fast=True)]


class MessageItem(Lenient):
    """With `type` or without, as the server wrote it or as people do."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCallItem(Lenient):
    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(Lenient):
    type: Literal["custom_tool_call"]
    id: str | None = None
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(Lenient):
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str | None = None
    call_id: str
    output: str | Parts


class SearchCallItem(Lenient):
    """A call of `tool_search`. One that the server executed may have no `call_id`."""

    type: Literal["tool_search_call"]
    id: str | None = None
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    arguments: Any = None


class SearchOutputItem(Lenient):
    """The tools that a search has found, which can be called from there on."""

    type: Literal["tool_search_output"]
    id: str | None = None
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    tools: Tools


class AdditionalToolsItem(Lenient):
    """Tools that a developer adds."""

    type: Literal["additional_tools"]
    id: str | None = None
    role: Literal["developer"] | None = None
    tools: Tools


class ReasoningItem(Lenient):
    type: Literal["reasoning"]
    id: str | None = None
    summary: Thoughts | None = None
    content: Thoughts | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The thoughts in full where they are there, else what is told of them."""
        told = BETWEEN.join([part.text for part in self.content or ()])
        return (
            told
            or decoded(self.encrypted_content)
            or BETWEEN.join([part.text for part in self.summary or ()])
        )


class ItemReference(Lenient):
    type: Literal["item_reference"] = "item_reference"
    id: str


_TAGS = {
    "message": "[message]",
    "function_call": "[function_call]",
    "function_call_output": "[output]",
    "custom_tool_call": "[custom_tool_call]",
    "custom_tool_call_output": "[output]",
    "tool_search_call": "[search_call]",
    "tool_search_output": "[search_output]",
    "additional_tools": "[tools]",
    "reasoning": "[reasoning]",
    "item_reference": "[reference]",
}
Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[CustomCallItem, Tag("[custom_tool_call]")]
    | Annotated[CallOutputItem, Tag("[output]")]
    | Annotated[SearchCallItem, Tag("[search_call]")]
    | Annotated[SearchOutputItem, Tag("[search_output]")]
    | Annotated[AdditionalToolsItem, Tag("[tools]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[reference]")]
    | Annotated[OtherObject, Tag("[other]")],
    by_type(_TAGS, untyped="message"),
]


FlatName = Callable[[str | None, str], str]
"""Gives the model's name for a tool, by its namespace and its name there."""


def chat_messages(
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
        _read(turns, item, flat, f"input[{number - before}]")
    return [turn.message() for turn in turns]


def _read(turns: list[Turn], item: Item, flat: FlatName, where: str) -> None:
    if isinstance(item, MessageItem):
        # Templates know the older name of a developer, and most take one such message.
        role = "system" if item.role == "developer" else item.role
        turn_of(turns, role).texts.append(text_of(item.content, f"{where}.content"))
    elif isinstance(item, CallOutputItem):
        text = text_of(item.output, f"{where}.output")
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
        found = _names(item.tools, flat)
        text = "Tools that can be called now: " + ", ".join(found) if found else "No tools found."
        turns.append(Turn("tool", [text], answers=item.call_id or SEARCH))
    elif not isinstance(item, AdditionalToolsItem):
        raise UnsupportedParameter(
            f"{where}: an item of type {item.type!r} is not supported by this server.", param=where
        )


def _names(tools: Sequence[Tool], flat: FlatName) -> list[str]:
    """Return the model's names for tools, without those that no client runs."""
    names = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            own = [member for member in tool.tools if not isinstance(member, OtherObject)]
            names += [flat(tool.name, member.name) for member in own]
        elif not isinstance(tool, OtherObject):
            names.append(tool.name)
    return names


_BRING_TOOLS = ("tool_search_output", "additional_tools")


def brought_tools(items: Sequence[Item], before: int = 0) -> Iterator[tuple[str, Sequence[Tool]]]:
    """Yield the tools that items bring, with the items' paths; `before` as in `chat_messages`."""
    for number, item in enumerate(items, -before):
        # The cheaper test comes first: `isinstance` of pydantic classes is slow.
        if item.type in _BRING_TOOLS and isinstance(item, SearchOutputItem | AdditionalToolsItem):
            yield f"input[{number}]" if number >= 0 else "conversation", item.tools


def check_outputs(items: Sequence[Item], before: int = 0) -> None:
    """Raises InvalidRequest for the output of a call that does not come before it.

    `before` as in `chat_messages`; what is wrong with those is wrong with their conversation.
    """
    calls = set()
    for number, item in enumerate(items, -before):
        if isinstance(item, FunctionCallItem | CustomCallItem | SearchCallItem):
            calls.add(item.call_id)
        elif isinstance(item, CallOutputItem | SearchOutputItem) and item.call_id not in calls:
            if item.call_id is None:  # of a search that the server executed
                continue
            where = f"input[{number}].call_id" if number >= 0 else "conversation"
            raise InvalidRequest(
                f"{where}: no call {item.call_id!r} comes before this output.", param=where
            )


def text_of(content: str | Sequence[ItemText | OtherObject], where: str) -> str:
    """The text of parts that may be nothing else. Raises UnsupportedParameter."""
    if isinstance(content, str):
        return content
    return BETWEEN.join([_text(part, f"{where}[{n}]") for n, part in enumerate(content)])


def _text(part: ItemText | OtherObject, where: str) -> str:
    if isinstance(part, OtherObject):
        raise UnsupportedParameter(
            f"{where}: found a part of type {part.type!r}; this server takes text only.",
            param=where,
        )
    return part.text
