"""Conversation items as clients send them.

Reference: OpenAI API, "Create a model response" (2026), and the types of its Python package.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, Tag

from gateway.api.openai.messages import Lenient
from gateway.api.openai.turns import BETWEEN
from gateway.api.responses.other_objects import OtherObject
from gateway.api.responses.tools import Tools
from gateway.api.unions import by_type

_ENCODED_PREFIX = "thoughts:"


def encode_thoughts(thoughts: str) -> str:
    """Encode reasoning as `encrypted_content`.

    Some clients send back only this field of a reasoning item. The text is encoded in base64, not
    encrypted, because it is not secret.
    """
    return _ENCODED_PREFIX + urlsafe_b64encode(thoughts.encode()).decode()


def decode_thoughts(content: str | None) -> str:
    """Decode `encrypted_content` to the reasoning text.

    Return "" for content from another server, which is unreadable here.
    """
    if content is None or not content.startswith(_ENCODED_PREFIX):
        return ""
    try:
        return urlsafe_b64decode(content.removeprefix(_ENCODED_PREFIX)).decode()
    except (binascii.Error, ValueError):
        return ""


class ItemText(Lenient):
    """A text part. A `refusal` part holds the words with which an assistant declined."""

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
    """A message. Clients may leave out `type`, which servers always write."""

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
    """A call of `tool_search`. If OpenAI's server executed the call, `call_id` may be missing."""

    type: Literal["tool_search_call"]
    id: str | None = None
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    arguments: Any = None


class SearchOutputItem(Lenient):
    """The tools that a search returned. They can be called from this item onwards."""

    type: Literal["tool_search_output"]
    id: str | None = None
    call_id: str | None = None
    execution: Literal["server", "client"] | None = None
    tools: Tools


class AdditionalToolsItem(Lenient):
    """Tools that the client adds in the middle of a conversation, in the role of the developer."""

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
        """The full reasoning text if available, else the summary."""
        full = BETWEEN.join([part.text for part in self.content or ()])
        return (
            full
            or decode_thoughts(self.encrypted_content)
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
