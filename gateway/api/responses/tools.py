"""Tools and tool choices of the Responses API as clients send them.

Reference: OpenAI API, "Create a model response" (2026), and the types of its Python package.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.api.openai.chat_tools import BY_FORMAT, TextFormat
from gateway.api.openai.messages import FunctionName, Lenient
from gateway.api.responses.other_objects import OtherObject
from gateway.api.unions import by_type

MAX_TOOLS = 1024
"""Maximum number of a request's tools, including those in namespaces and in items of the input."""


def _check_callers(callers: list[str]) -> list[str]:
    if "direct" not in callers:
        raise PydanticCustomError("callers", "Input should have direct; no program calls tools")
    return callers


class OwnTool(Lenient):
    """A tool that the client runs."""

    name: FunctionName
    description: str | None = None
    allowed_callers: (
        Annotated[list[str], Field(fail_fast=True, max_length=64), AfterValidator(_check_callers)]
        | None
    ) = None


class FunctionTool(OwnTool):
    """A function. `defer_loading` has no effect: the prompt describes deferred functions, too."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarFormat(Lenient):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


InputFormat = Annotated[
    Annotated[TextFormat, Tag("[text]")] | Annotated[GrammarFormat, Tag("[grammar]")], BY_FORMAT
]
"""The format of a custom tool's input: any text, or text that matches a grammar."""


class CustomTool(OwnTool):
    """A tool that is called with plain text instead of JSON arguments."""

    type: Literal["custom"]
    format: InputFormat | None = None

    @property
    def grammar(self) -> str | None:
        return self.format.definition if isinstance(self.format, GrammarFormat) else None


class SearchTool(Lenient):
    """A tool with which the model searches for more tools.

    If the client executes the search, the prompt describes the tool as a function.
    """

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.type


_OWN = {"function": "[function]", "custom": "[custom]"}
Member = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[OtherObject, Tag("[other]")],
    by_type(_OWN),
]


class NamespaceTool(Lenient):
    """Tools under one name, such as those of an MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[Member], Field(fail_fast=True, max_length=MAX_TOOLS)]


Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[SearchTool, Tag("[search]")]
    | Annotated[OtherObject, Tag("[other]")],
    by_type(_OWN | {"namespace": "[namespace]", "tool_search": "[search]"}),
]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class NamedTool(Lenient):
    """A choice of one tool by its name, or of all tools of a namespace."""

    type: Literal["function", "custom", "namespace"]
    name: str
    namespace: str | None = None


_NAMED = {"function": "[named]", "custom": "[named]"}


class AllowedTools(Lenient):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedTool, Tag("[named]")] | Annotated[OtherObject, Tag("[other]")],
                by_type(_NAMED | {"namespace": "[named]"}),
            ]
        ],
        Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS),
    ]


Choice = Annotated[
    Annotated[NamedTool, Tag("[named]")]
    | Annotated[AllowedTools, Tag("[allowed]")]
    | Annotated[OtherObject, Tag("[other]")],
    by_type(_NAMED | {"allowed_tools": "[allowed]"}),
]
ToolChoice = Literal["none", "auto", "required"] | Choice
