"""Items of a conversation as clients send them, and the chat messages that they are.

Reference: OpenAI API, "Create a model response" (2026), and the types of its Python package.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AliasChoices, Discriminator, Field, Tag

from gateway.api.messages import Lenient
from gateway.api.turns import BETWEEN, Turn, turn_of
from gateway.errors import InvalidRequest, UnsupportedParameter

CUSTOM_INPUT = "input"
"""The one argument of the function that a custom tool is to the model."""
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


def by_type(tags: Mapping[str, str], untyped: str = "") -> Discriminator:
    """Tells objects apart by their type; those that have no type are of `untyped`.

    A tag has brackets, so that it is no part of a path (`gateway.api.validation.location`).
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None:
            # A reference may be no more than an id.
            bare = isinstance(value, dict) and "id" in value and "role" not in value
            kind = "item_reference" if bare and "item_reference" in tags else untyped
        return tags.get(kind, "[other]") if isinstance(kind, str) else "[other]"

    return Discriminator(tag)


class OtherObject(Lenient):
    """What is no text, or what only OpenAI's own tools make: refused by its place, and never left
    out."""

    type: str


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
    # Of a tool that would not be found by its name alone.
    namespace: None = None


class CustomCallItem(Lenient):
    type: Literal["custom_tool_call"]
    id: str | None = None
    call_id: str
    name: str
    input: str
    namespace: None = None


class CallOutputItem(Lenient):
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str | None = None
    call_id: str
    output: str | Parts


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
    "reasoning": "[reasoning]",
    "item_reference": "[reference]",
}
Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[CustomCallItem, Tag("[custom_tool_call]")]
    | Annotated[CallOutputItem, Tag("[output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[reference]")]
    | Annotated[OtherObject, Tag("[other]")],
    by_type(_TAGS, untyped="message"),
]


def chat_messages(
    instructions: str | None, items: Sequence[Item], before: int = 0
) -> list[dict[str, Any]]:
    """As chats have them: what an assistant thinks, says and calls in a row is one message.

    `before` of the items were not in the request's `input` but come before it. Raises
    UnsupportedParameter for what is no text, by its place in `input`.
    """
    turns: list[Turn] = []
    if instructions:
        turns.append(Turn("system", [instructions]))
    for number, item in enumerate(items):
        _read(turns, item, f"input[{number - before}]")
    return [turn.message() for turn in turns]


def _read(turns: list[Turn], item: Item, where: str) -> None:
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
        turn_of(turns, "assistant").call(item.call_id, item.name, item.arguments)
    elif isinstance(item, CustomCallItem):
        arguments = orjson.dumps({CUSTOM_INPUT: item.input}).decode()
        turn_of(turns, "assistant").call(item.call_id, item.name, arguments)
    else:
        raise UnsupportedParameter(
            f"{where}: an item of type {item.type!r} is not supported by this server.", param=where
        )


def check_outputs(items: Sequence[Item], before: int = 0) -> None:
    """Raises InvalidRequest for the output of a call that does not come before it.

    `before` as in `chat_messages`; what is wrong with those is wrong with their conversation.
    """
    calls = set()
    for number, item in enumerate(items, -before):
        if isinstance(item, FunctionCallItem | CustomCallItem):
            calls.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in calls:
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
