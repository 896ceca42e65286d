"""Models of the `tools` and `tool_choice` of OpenAI's chat completions."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_serializer

from gateway.api.openai import custom_tools
from gateway.api.openai.messages import FUNCTION_OR_CUSTOM, FunctionName, Lenient
from gateway.api.unions import by_type


class FunctionDefinition(Lenient):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


BY_FORMAT = by_type({"text": "[text]", "grammar": "[grammar]"}, expected="text or grammar")


class ChatFunctionTool(Lenient):
    type: Literal["function"]
    function: FunctionDefinition


class Grammar(Lenient):
    definition: str
    syntax: Literal["lark", "regex"]


class TextFormat(Lenient):
    type: Literal["text"]


class ChatGrammarFormat(Lenient):
    type: Literal["grammar"]
    grammar: Grammar


CustomFormat = Annotated[
    Annotated[TextFormat, Tag("[text]")] | Annotated[ChatGrammarFormat, Tag("[grammar]")], BY_FORMAT
]
"""The format of a custom tool's input: any text, or text that matches a grammar."""


class CustomDefinition(Lenient):
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class ChatCustomTool(Lenient):
    """A custom tool, which is called with plain text instead of JSON arguments.

    Chat templates and guided decoding use `function` instead: a function with one string parameter.
    """

    type: Literal["custom"]
    custom: CustomDefinition

    @cached_property
    def function(self) -> FunctionDefinition:
        given, grammar = self.custom, self.grammar
        syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, None)
        return FunctionDefinition(
            name=given.name,
            description=custom_tools.describe(given.description, syntax, definition),
            parameters=custom_tools.PARAMETERS,
        )

    @property
    def grammar(self) -> Grammar | None:
        given = self.custom.format
        return given.grammar if isinstance(given, ChatGrammarFormat) else None

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


Tool = Annotated[
    Annotated[ChatFunctionTool, Tag("[function]")] | Annotated[ChatCustomTool, Tag("[custom]")],
    FUNCTION_OR_CUSTOM,
]


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]


class ToolName(Lenient):
    name: str


class NamedChoice(Lenient):
    type: Literal["function"]
    function: ToolName

    @property
    def name(self) -> str:
        return self.function.name


class CustomChoice(Lenient):
    type: Literal["custom"]
    custom: ToolName

    @property
    def name(self) -> str:
        return self.custom.name


OneTool = Annotated[
    Annotated[NamedChoice, Tag("[function]")] | Annotated[CustomChoice, Tag("[custom]")],
    FUNCTION_OR_CUSTOM,
]


class ChatAllowedTools(Lenient):
    mode: Literal["auto", "required"]
    tools: Annotated[list[OneTool], Field(fail_fast=True, min_length=1, max_length=128)]


class AllowedChoice(Lenient):
    type: Literal["allowed_tools"]
    allowed_tools: ChatAllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedChoice, Tag("[function]")]
        | Annotated[CustomChoice, Tag("[custom]")]
        | Annotated[AllowedChoice, Tag("[allowed_tools]")],
        by_type(
            {name: f"[{name}]" for name in ("function", "custom", "allowed_tools")},
            "function",
            expected="function, custom or allowed_tools",
        ),
    ]
)
