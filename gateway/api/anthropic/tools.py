"""Tools and tool choices of the Messages API, and their conversion to OpenAI's format."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic.json_schema import SkipJsonSchema

from gateway.api.hosted_tools import HostedTool, find_meant_type, refuse_hosted
from gateway.api.openai.messages import FunctionName, Lenient, Strict
from gateway.api.validation import show_value
from gateway.errors import InvalidRequest

MAX_TOOLS = 1024
_CLIENT_TYPES = (None, "custom")
"""Values of `type` for tools that the client runs. None stands for a tool without a type."""


class Tool(Lenient):
    """A tool that the client runs, or a hosted tool.

    A hosted tool has a `type` that Anthropic defines, and may have no name, for example
    `mcp_toolset`. Some hosted tools run at Anthropic. Others run at the client, but have no schema
    in the request, because Anthropic's models already know the schema.
    """

    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    function: SkipJsonSchema[Any] = None
    """A field that only OpenAI's tools have. A tool with this field is refused."""

    @property
    def takes_any_field(self) -> bool:
        return not _is_own(self)


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def select_own_tools(tools: Sequence[Tool]) -> list[tuple[int, Tool]]:
    """Return the tools that the client runs, each with its index in the request's list.

    Raise InvalidRequest for a tool in OpenAI's format, and for a misspelled type.
    """
    own = []
    for n, tool in enumerate(tools):
        _check_form(tool, n)
        if _is_own(tool):
            own.append((n, tool))
    return own


def select_hosted_tools(tools: Sequence[Tool]) -> list[HostedTool]:
    """Return the hosted tools, which are left out of the prompt."""
    return [
        HostedTool(f"tools.{n}.type", tool.type)
        for n, tool in enumerate(tools)
        if tool.type is not None and not _is_own(tool)
    ]


def _check_form(tool: Tool, number: int) -> None:
    """Raise InvalidRequest for a tool in OpenAI's format, and for a misspelled `custom`.

    Without this check, such a tool would count as a hosted tool and be left out of the prompt.
    """
    is_openai = tool.type == "function" and tool.input_schema is None
    if is_openai or tool.function is not None:
        where = f"tools.{number}"
        raise InvalidRequest(
            f"{where}: found OpenAI's form of a tool; send name, description and input_schema in "
            "the tool itself, and leave out type and function.",
            param=where,
        )
    if tool.type is None or _is_own(tool):
        return
    if find_meant_type(tool.type) is not None:
        where = f"tools.{number}.type"
        raise InvalidRequest(
            f"{where}: found {show_value(tool.type)}; did you mean custom, with name, description "
            "and input_schema?",
            param=where,
        )


def _is_own(tool: Tool) -> bool:
    """Return True if the client runs the tool: the tool has no type, the type `custom`, or a
    schema."""
    return tool.type in _CLIENT_TYPES or tool.input_schema is not None


def check_demand(choice: ToolChoice, tools: Sequence[Tool], own: Collection[str]) -> None:
    """Raise UnsupportedParameter if a choice demands a call of a hosted tool.

    Args:
        choice: the request's tool_choice.
        tools: all tools of the request.
        own: the names of the tools that the client runs.
    """
    if choice.type == "any" and not own:
        refuse_hosted(select_hosted_tools(tools))
    if choice.type == "tool" and choice.name not in own:
        named = [
            HostedTool(f"tools.{n}.type", tool.type or "")
            for n, tool in enumerate(tools)
            if choice.name is not None and tool.name == choice.name
        ]
        refuse_hosted(named)


def to_function(tool: Tool, number: int) -> dict[str, Any]:
    """Convert a tool to OpenAI's format. Raise InvalidRequest for a missing field."""
    for field in ("name", "input_schema"):
        if getattr(tool, field) is None:
            where = f"tools.{number}.{field}"
            given = [name for name, value in tool if value is not None]
            found = f"; found {', '.join(given)}" if given else ""
            raise InvalidRequest(f"{where}: Field required{found}.", param=where)
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def to_chat_choice(choice: ToolChoice) -> dict[str, Any]:
    """Convert a tool choice to fields of a chat request.

    Raise InvalidRequest if a choice of the type `tool` has no `name`. Also raise it if a choice of
    any other type has a `name`.
    """
    if (choice.name is None) is (choice.type == "tool"):
        raise InvalidRequest(
            "tool_choice.name: goes with the type `tool`, which needs it.", param="tool_choice.name"
        )
    chosen: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen["tool_choice"] = "required" if choice.type == "any" else choice.type
    return chosen
