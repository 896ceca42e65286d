"""Tools and tool choices as the Responses API has them, and as chats do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.api.messages import FunctionName, Lenient
from gateway.api.responses.items import CUSTOM_INPUT, OtherObject, by_type
from gateway.errors import InvalidRequest, UnsupportedParameter

_CUSTOM = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


def _by_the_model(callers: list[str]) -> list[str]:
    if "direct" not in callers:
        raise PydanticCustomError("callers", "Input should have direct; no program calls tools")
    return callers


class OwnTool(Lenient):
    """One that the client runs."""

    name: FunctionName
    description: str | None = None
    allowed_callers: Annotated[list[str], AfterValidator(_by_the_model)] | None = None


class FunctionTool(OwnTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(Lenient):
    """What a custom tool's input is: any text, or one that a grammar describes."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(OwnTool):
    """One whose argument is a text: to the model it is a function of one string."""

    type: Literal["custom"]
    format: InputFormat | None = None

    @property
    def grammar(self) -> str | None:
        return self.format.definition if self.format is not None else None


Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[OtherObject, Tag("[other]")],
    by_type({"function": "[function]", "custom": "[custom]"}),
]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]


class NamedTool(Lenient):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(Lenient):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=128)]


Choice = Annotated[
    Annotated[NamedTool, Tag("[named]")]
    | Annotated[AllowedTools, Tag("[allowed]")]
    | Annotated[OtherObject, Tag("[other]")],
    by_type({"function": "[named]", "custom": "[named]", "allowed_tools": "[allowed]"}),
]
ToolChoice = Literal["none", "auto", "required"] | Choice


def offered(tools: Sequence[Tool], choice: ToolChoice | None) -> list[int]:
    """Which of the tools may be called, by their places. Raises what is wrong with a choice."""
    for number, tool in enumerate(tools):
        if isinstance(tool, OtherObject):
            where = f"tools[{number}].type"
            raise UnsupportedParameter(
                f"{where}: {tool.type!r} is not supported by this server; allowed: function and "
                "custom, tools that the client runs.",
                param=where,
            )
    _check_names(tools)
    if not isinstance(choice, AllowedTools):
        return [*range(len(tools))]
    names = {tool.name for tool in tools if not isinstance(tool, OtherObject)}
    for number, allowed in enumerate(choice.tools):
        if allowed.name not in names:
            where = f"tool_choice.tools[{number}].name"
            raise InvalidRequest(f"{where}: found {allowed.name!r}, no tool's name.", param=where)
    wanted = {tool.name for tool in choice.tools}
    return [
        n
        for n, tool in enumerate(tools)
        if not isinstance(tool, OtherObject) and tool.name in wanted
    ]


def _check_names(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest where a name does not say what its calls are."""
    kinds: dict[str, str] = {}
    for number, tool in enumerate(tools):
        if (
            not isinstance(tool, OtherObject)
            and kinds.setdefault(tool.name, tool.type) != tool.type
        ):
            where = f"tools[{number}].name"
            raise InvalidRequest(
                f"{where}: found {tool.name!r}, also the name of a tool of type "
                f"{kinds[tool.name]}.",
                param=where,
            )


def function(tool: Tool) -> dict[str, Any]:
    """A tool as chats have it."""
    assert not isinstance(tool, OtherObject)  # `offered` refuses them
    if isinstance(tool, FunctionTool):
        told = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        return {"type": "function", "function": told}
    texts = [tool.description] if tool.description else []
    if tool.format is not None and tool.grammar is not None:
        texts.append(
            f"The {CUSTOM_INPUT} must match this grammar ({tool.format.syntax}):\n{tool.grammar}"
        )
    told = {"name": tool.name, "description": "\n\n".join(texts) or None, "parameters": _CUSTOM}
    return {"type": "function", "function": told}


def chat_choice(choice: ToolChoice) -> Any:
    """A choice as chats have it; of what may be called `offered` tells."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, AllowedTools):
        return choice.mode
    if isinstance(choice, NamedTool):
        return {"type": "function", "function": {"name": choice.name}}
    raise UnsupportedParameter(
        f"tool_choice.type: {choice.type!r} is not supported by this server; allowed: function, "
        "custom and allowed_tools.",
        param="tool_choice.type",
    )


def unenforced(tools: Sequence[Tool], choice: ToolChoice | None) -> Iterator[str]:
    """What the model is told of its input, and may not keep to."""
    if choice != "none" and any(isinstance(tool, CustomTool) and tool.grammar for tool in tools):
        yield "tools.format"
