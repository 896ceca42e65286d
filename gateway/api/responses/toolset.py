"""Tools of a request, with their names in the prompt.

A chat template only supports a flat list of functions. So a tool in a namespace gets the namespace
as a prefix of its name. Calls are returned to the client with the tool's own name and the
namespace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.api.hosted_tools import HostedTool, find_meant_type, name_hosted, refuse_hosted
from gateway.api.openai import custom_tools
from gateway.api.responses.other_objects import OtherObject
from gateway.api.responses.tool_names import CallKind, ToolCallNames, flat_name
from gateway.api.responses.tools import (
    MAX_TOOLS,
    AllowedTools,
    CustomTool,
    FunctionTool,
    GrammarFormat,
    NamedTool,
    NamespaceTool,
    SearchTool,
    Tool,
    ToolChoice,
)
from gateway.api.validation import list_names, show_value
from gateway.errors import InvalidRequest, UnsupportedParameter

ToolKey = tuple[str | None, str]
"""A tool's namespace (None without one), and the tool's name in that namespace."""

_KINDS: dict[str, CallKind] = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "tool_search": "tool_search_call",
}


class OwnToolAt(NamedTuple):
    """A tool that the client runs, and its path in the request.

    Attributes:
        tool: the tool.
        where: the path of the tool in the request.
        namespace: the name of the tool's namespace; None without one.
        about: the description of the tool's namespace; None without one.
    """

    tool: FunctionTool | CustomTool | SearchTool
    where: str
    namespace: str | None = None
    about: str | None = None

    @property
    def key(self) -> ToolKey:
        return self.namespace, self.tool.name


class Toolset:
    """The tools of one request: those in its field `tools`, and those in items of its input.

    Attributes:
        own: Tools that the client runs.
        hosted: Hosted tools, which are left out of the prompt.
    """

    def __init__(self) -> None:
        self.own: list[OwnToolAt] = []
        self.hosted: list[HostedTool] = []
        self._hosted_types: set[str] = set()
        self._namespaces: dict[str, None] = {}
        self._types: dict[ToolKey, str] = {}
        self._names: dict[ToolKey, str] = {}
        self._bare: defaultdict[str, list[ToolKey]] = defaultdict(list)

    @classmethod
    def of(cls, tools: Sequence[Tool], item_tools: Iterable[tuple[str, Sequence[Tool]]]) -> Toolset:
        """Collect the tools of a request.

        `item_tools` has the path and the tools of each item that contains tools. If an item repeats
        a tool, the first definition is used. Raise InvalidRequest for two tools with the same name,
        and for too many tools.
        """
        toolset = cls()
        for n, tool in enumerate(tools):
            toolset._add(tool, f"tools[{n}]", again=True)
        for path, more in item_tools:
            for n, tool in enumerate(more):
                toolset._add(tool, f"{path}.tools[{n}]", again=False)
        toolset._name_all()
        return toolset

    def flatten_name(self, namespace: str | None, name: str) -> str:
        """Return a tool's name in the prompt. The tool need not be in this set."""
        if namespace is None:
            return name
        return self._names.get((namespace, name)) or flat_name(namespace, name)

    def select_callable(self, choice: ToolChoice | None, *, complete: bool) -> list[OwnToolAt]:
        """Return the tools that may be called.

        `complete` is False while items that may contain more tools are not loaded yet. Raise
        InvalidRequest for a choice of an unknown tool. Raise UnsupportedParameter if the choice
        demands a call, but only hosted tools could be called.
        """
        found = self.own
        if isinstance(choice, AllowedTools):
            wanted = self._resolve_allowed(choice, complete=complete)
            found = [each for each in found if each.key in wanted]
        demanded = choice.mode if isinstance(choice, AllowedTools) else choice
        if demanded == "required" and not found and complete:
            refuse_hosted(self.hosted)
        return found

    def to_chat_choice(self, choice: ToolChoice, *, complete: bool) -> Any:
        """Convert `tool_choice` to the format of chat requests.

        Raise InvalidRequest or UnsupportedParameter for an invalid choice.
        """
        if isinstance(choice, str):
            return choice
        if isinstance(choice, AllowedTools):
            return choice.mode
        if isinstance(choice, NamedTool):
            key = self._resolve(choice, "tool_choice", complete=complete)
            return {"type": "function", "function": {"name": self.flatten_name(*key)}}
        raise UnsupportedParameter(
            f"tool_choice.type: {choice.type!r} is not supported by this server; allowed: "
            "function, custom and allowed_tools.",
            param="tool_choice.type",
        )

    def build_functions(self, tools: Sequence[OwnToolAt]) -> list[dict[str, Any]]:
        """Return tools in the format of chat requests.

        The description of a namespace's first tool begins with the namespace's description.
        """
        described: set[str] = set()
        functions = []
        for each in tools:
            function = _build_function(each.tool)
            function["name"] = self.flatten_name(*each.key)
            if each.namespace is not None and each.namespace not in described:
                described.add(each.namespace)
                texts = (each.about, function["description"])
                function["description"] = "\n\n".join(filter(None, texts)) or None
            functions.append({"type": "function", "function": function})
        return functions

    def map_calls(self, tools: Sequence[OwnToolAt]) -> Mapping[str, ToolCallNames]:
        """Return the `ToolCallNames` of `tools`, by the names that the tools have in the prompt.

        Tool calls are returned to the client with the item type and the names in `ToolCallNames`.
        Functions without a namespace are left out. Models sometimes leave out a namespace's prefix.
        So a tool's name without the prefix is a second key, if no other tool of the request has
        that name.
        """
        taken = {*self._names.values()}
        flat = {self.flatten_name(*each.key): each for each in tools}
        names = {
            each.tool.name: each
            for each in tools
            if len(self._bare[each.tool.name]) == 1 and each.tool.name not in taken
        }
        return {
            name: ToolCallNames(_KINDS[each.tool.type], each.tool.name, each.namespace)
            for name, each in (names | flat).items()
            if each.namespace is not None or each.tool.type != "function"
        }

    def list_hints(self) -> tuple[str, ...]:
        """Return names for the header x-ignored-parameters.

        These are the hosted tools, which cannot be called, and the grammars of custom tools, which
        are not enforced.
        """
        hints = name_hosted(self.hosted)
        if any(isinstance(each.tool, CustomTool) and each.tool.grammar for each in self.own):
            hints.append("tools.format")
        return tuple(hints)

    def _add(self, tool: Tool, where: str, *, again: bool) -> None:
        if isinstance(tool, NamespaceTool):
            self._namespaces[tool.name] = None
            for n, member in enumerate(tool.tools):
                at = f"{where}.tools[{n}]"
                if isinstance(member, OtherObject):
                    self._add_hosted(HostedTool(f"{at}.type", member.type), again=again)
                else:
                    self._add_own(OwnToolAt(member, at, tool.name, tool.description), again=again)
        elif isinstance(tool, OtherObject) or _is_server_search(tool):
            # Treat a search that the server would execute like a hosted tool. This server gives all
            # tools to the model at once, so such a search could not find any further tool.
            self._add_hosted(HostedTool(f"{where}.type", tool.type), again=again)
        else:
            self._add_own(OwnToolAt(tool, where), again=again)
        count = len(self.own) + len(self.hosted)
        if count > MAX_TOOLS:
            raise InvalidRequest(
                f"tools: found more than {MAX_TOOLS} tools, with those of namespaces and of "
                f"input; allowed: {MAX_TOOLS}.",
                param="tools",
            )

    def _add_hosted(self, added: HostedTool, *, again: bool) -> None:
        # Check only the request's own tools for misspelled types. Tools within items may come from
        # earlier requests, in which the gateway accepted these types.
        if again and (meant := find_meant_type(added.type)) is not None:
            raise InvalidRequest(
                f"{added.param}: found {show_value(added.type)}; did you mean {meant}?",
                param=added.param,
            )
        if again or added.type not in self._hosted_types:
            self._hosted_types.add(added.type)
            self.hosted.append(added)

    def _add_own(self, added: OwnToolAt, *, again: bool) -> None:
        kind = self._types.setdefault(added.key, added.tool.type)
        if kind != added.tool.type:
            where = f"{added.where}.name"
            raise InvalidRequest(
                f"{where}: found {added.tool.name!r}, also the name of a tool of type {kind}.",
                param=where,
            )
        if added.key in self._names and not again:
            return
        if added.key not in self._names:
            self._names[added.key] = ""
            self._bare[added.tool.name].append(added.key)
        self.own.append(added)

    def _name_all(self) -> None:
        """Give each tool of a namespace a unique name in the prompt. Raise InvalidRequest if two
        names collide."""
        claims = Counter(
            [name if space is None else flat_name(space, name) for space, name in self._names]
        )
        owners: dict[str, ToolKey] = {}
        for each in self.own:
            space, name = each.key
            flat = name
            if space is not None:
                flat = flat_name(space, name, short=claims[flat_name(space, name)] > 1)
            self._names[each.key] = flat
            if owners.setdefault(flat, each.key) != each.key:
                where = f"{each.where}.name"
                raise InvalidRequest(
                    f"{where}: found {name!r}, which is {flat!r} to the model, and so is another "
                    "tool; rename one of them.",
                    param=where,
                )

    def _resolve_allowed(self, choice: AllowedTools, *, complete: bool) -> set[ToolKey]:
        wanted: set[ToolKey] = set()
        members: defaultdict[str | None, list[ToolKey]] = defaultdict(list)
        for each in self.own:
            members[each.namespace].append(each.key)
        for n, named in enumerate(choice.tools):
            where = f"tool_choice.tools[{n}]"
            if isinstance(named, OtherObject):
                if named.type == "tool_search":  # The only hosted type that a client may run
                    wanted.add((None, named.type))
            elif named.type == "namespace":
                if named.name not in self._namespaces and complete:
                    raise _build_unknown_error(
                        f"{where}.name", named.name, "namespace", self._namespaces
                    )
                wanted.update(members.pop(named.name, ()))
            else:
                wanted.add(self._resolve(named, where, complete=complete))
        return wanted

    def _resolve(self, named: NamedTool, where: str, *, complete: bool) -> ToolKey:
        """Return the key of the tool that a choice names.

        The choice may leave out the namespace if only one tool has this name.
        """
        key: ToolKey = (named.namespace, named.name)
        if key in self._names:
            return key
        keys = self._bare.get(named.name, []) if named.namespace is None else []
        if len(keys) == 1:
            return keys[0]
        if keys:
            spaces = list_names([str(space) for space, _ in keys])
            raise InvalidRequest(
                f"{where}.namespace: {named.name!r} is a tool of several namespaces; allowed: "
                f"{spaces}.",
                param=f"{where}.namespace",
            )
        if complete:
            space = named.namespace
            if space is not None and space not in self._namespaces:
                raise _build_unknown_error(
                    f"{where}.namespace", space, "namespace", self._namespaces
                )
            known = [name for space, name in self._names if space == named.namespace]
            raise _build_unknown_error(f"{where}.name", named.name, "tool", known)
        return key


NO_TOOLS = Toolset()


def _is_server_search(tool: Tool) -> bool:
    return isinstance(tool, SearchTool) and tool.execution != "client"


def _build_unknown_error(
    param: str, found: str, kind: str, known: Collection[str]
) -> InvalidRequest:
    allowed = f"; allowed: {list_names(known)}" if known else ""
    return InvalidRequest(
        f"{param}: found {show_value(found)}, not the name of a {kind}{allowed}.", param=param
    )


def _build_function(tool: FunctionTool | CustomTool | SearchTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        syntax = tool.format.syntax if isinstance(tool.format, GrammarFormat) else None
        return {
            "description": custom_tools.describe(tool.description, syntax, tool.grammar),
            "parameters": custom_tools.PARAMETERS,
        }
    return {
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict if isinstance(tool, FunctionTool) else None,
    }
