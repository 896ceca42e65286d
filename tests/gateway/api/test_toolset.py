"""Tools of the Responses API: namespaces, hosted tools, tools in input items, and tool choices."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.responses.chats import ResponsesChat, build_chat, parse
from gateway.api.responses.prompts import _find_cuts
from gateway.api.responses.requests import ResponseRequest
from gateway.api.responses.stored import parse_items
from gateway.api.responses.tools import MAX_TOOLS
from gateway.deltas import TextDelta
from gateway.errors import InvalidRequest, UnsupportedParameter
from tests.support.response_streams import (
    FUNCTION,
    PATCH,
    QUESTION,
    chat,
    complete_answer,
    stream_answer,
)
from tests.support.tool_calls import call_events

QUERY = {"type": "function", "name": "query", "description": "Runs SQL"}
POSTGRES = {"type": "namespace", "name": "mcp__pg", "description": "A database", "tools": [QUERY]}
MYSQL = POSTGRES | {"name": "mcp__my__"}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools"}
SEARCH_CALL = {
    "type": "tool_search_call",
    "call_id": "s1",
    "execution": "client",
    "arguments": {"query": "sql"},
}
FOUND = {"type": "tool_search_output", "call_id": "s1", "execution": "client", "tools": [POSTGRES]}
HOSTED = [
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "computer"),
    *("mcp", "image_generation", "local_shell", "shell", "apply_patch", "next_years"),
]
FLAT = re.compile(r"[a-zA-Z0-9_.:/-]{1,64}")


def names(wanted: ResponsesChat) -> list[str]:
    return [tool.function.name for tool in wanted.tools or []]


def hints(**fields: Any) -> tuple[str, ...]:
    return parse(ResponseRequest, orjson.dumps({"model": "m", "input": "Hi"} | fields)).hints


def allowed(*tools: Any, mode: str = "required") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [*tools]}


def test_a_namespaces_tools_are_functions_with_its_name() -> None:
    note = PATCH | {"name": "note", "format": {"type": "text"}}
    more = POSTGRES | {"tools": [QUERY, note]}
    wanted = chat(tools=[FUNCTION, more, MYSQL])
    assert names(wanted) == ["f", "mcp__pg__query", "mcp__pg__note", "mcp__my__query"]
    descriptions = [tool.function.description for tool in wanted.tools or []]
    assert descriptions == [
        *(None, "A database\n\nRuns SQL", "Edits files"),
        "A database\n\nRuns SQL",
    ]


texts = st.text(alphabet="ab_", min_size=1, max_size=3)


@given(
    st.dictionaries(texts, st.lists(texts, min_size=1, max_size=4, unique=True), max_size=4),
    st.lists(texts, max_size=4, unique=True),
    st.integers(1, 128),
)
def test_each_tool_has_a_name_of_its_own_which_leads_back(
    spaces: dict[str, list[str]], plain: list[str], longest: int
) -> None:
    def long(name: str) -> str:
        return (name * 128)[: max(longest, len(name))]

    tools: list[dict[str, Any]] = [FUNCTION | {"name": name} for name in plain]
    keys: list[tuple[str | None, str]] = [(None, name) for name in plain]
    for space, members in spaces.items():
        own = list(dict.fromkeys(map(long, members)))
        tools.append(POSTGRES | {"name": space, "tools": [FUNCTION | {"name": n} for n in own]})
        keys += [(space, name) for name in own]
    wanted = chat(tools=tools)
    flat = names(wanted)
    assert len(set(flat)) == len(keys)
    assert all(FLAT.fullmatch(name) for name in flat)
    for (space, name), model in zip(keys, flat, strict=True):
        deltas = [TextDelta("", 1, "stop", events=tuple(call_events(model)))]
        [item] = complete_answer(deltas, tools=tools)["output"]
        assert (item.get("namespace"), item["name"]) == (space, name)
        said = {k: v for k, v in item.items() if k != "id"}
        again = chat(input=[QUESTION, said], tools=tools).messages[1].tool_calls or []
        assert again[0].function.name == model  # type: ignore[union-attr]


def test_a_function_that_is_named_as_a_namespaces_keeps_its_name() -> None:
    wanted = chat(tools=[POSTGRES, QUERY | {"name": "mcp__pg__query"}])
    other, plain = names(wanted)
    assert plain == "mcp__pg__query"
    assert re.fullmatch(r"mcp__pg__query_[0-9a-f]{8}", other)
    with pytest.raises(InvalidRequest, match=f"'{other}' to the model") as refused:
        chat(tools=[POSTGRES, QUERY | {"name": "mcp__pg__query"}, QUERY | {"name": other}])
    assert refused.value.param == "tools[2].name"


@pytest.mark.parametrize(
    ("tool", "kind", "text"),
    [(QUERY, "function_call", "arguments"), (PATCH, "custom_tool_call", "input")],
)
def test_a_call_tells_the_namespace_and_the_bare_name(
    tool: dict[str, Any], kind: str, text: str
) -> None:
    name, tools = tool["name"], [POSTGRES | {"tools": [tool]}]
    arguments = '{"input":"x"}'
    events = tuple(call_events(f"mcp__pg__{name}", arguments))
    deltas = [TextDelta("", 1, "stop", events=events)]
    [item] = complete_answer(deltas, tools=tools)["output"]
    assert stream_answer(deltas, tools=tools)["output"] == [item]
    assert (item["type"], item["namespace"], item["name"]) == (kind, "mcp__pg", name)
    assert item[text] == ("x" if text == "input" else arguments)
    messages = chat(input=[QUESTION, item], tools=tools).messages
    [call] = messages[1].tool_calls or []
    assert call.function.name == f"mcp__pg__{name}"  # type: ignore[union-attr]


def test_a_call_of_a_namespace_that_is_no_more_keeps_its_name() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "query", "arguments": "{}"}
    messages = chat(input=[QUESTION, call | {"namespace": "mcp__pg"}]).messages
    [told] = messages[1].tool_calls or []
    assert told.function.name == "mcp__pg__query"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "named",
    [
        {"type": "function", "name": "query", "namespace": "mcp__pg"},
        {"type": "function", "name": "query"},
    ],
)
def test_a_namespaces_function_can_be_chosen(named: dict[str, Any]) -> None:
    wanted = chat(tools=[FUNCTION, POSTGRES], tool_choice=named)
    assert wanted.forced_call is not None
    assert wanted.forced_call.name == "mcp__pg__query"
    only = chat(tools=[FUNCTION, POSTGRES], tool_choice=allowed(named))
    assert names(only) == ["mcp__pg__query"]
    assert [name for _, name in only.build_guide_parts()] == ["tools[1].tools[0].parameters"]


def test_a_namespace_can_be_allowed_as_a_whole() -> None:
    choice = allowed({"type": "namespace", "name": "mcp__my__"}, {"type": "web_search"})
    assert names(chat(tools=[POSTGRES, MYSQL], tool_choice=choice)) == ["mcp__my__query"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "name": "query"}, "tool_choice.namespace"),
        (allowed({"type": "function", "name": "query"}), "tool_choice.tools[0].namespace"),
        ({"type": "function", "name": "x"}, "tool_choice.name"),
        ({"type": "function", "name": "query", "namespace": "x"}, "tool_choice.namespace"),
        (
            {"type": "function", "name": "nobody", "namespace": "mcp__pg"},
            "tool_choice.name",
        ),
        (allowed({"type": "namespace", "name": "x"}), "tool_choice.tools[0].name"),
    ],
)
def test_a_choice_that_names_no_tool_or_several_is_refused(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(param)}: ") as refused:
        chat(tools=[POSTGRES, MYSQL], tool_choice=choice)
    assert refused.value.param == param


@pytest.mark.parametrize("kind", HOSTED)
def test_a_hosted_tool_is_left_out_and_named(kind: str) -> None:
    tools = [FUNCTION, {"type": kind, "name": "x", "server_label": "y"}]
    assert names(chat(tools=tools)) == ["f"]
    assert hints(tools=tools) == (f"tools[1].type={kind}",)
    assert hints(tools=tools, tool_choice="required") == (f"tools[1].type={kind}",)
    assert hints(tools=tools[1:]) == (f"tools[0].type={kind}",)
    choice = allowed({"type": kind}, mode="auto")
    assert names(chat(tools=tools, tool_choice=choice)) == []


@pytest.mark.parametrize("kind", HOSTED)
def test_a_hosted_tool_is_refused_where_a_choice_demands_it(kind: str) -> None:
    tools = [FUNCTION, {"type": kind}]
    with pytest.raises(UnsupportedParameter, match=f"'{kind}'") as refused:
        chat(tools=tools, tool_choice={"type": kind})
    assert refused.value.param == "tool_choice.type"
    for only, choice in ((tools[1:], "required"), (tools, allowed({"type": kind}))):
        with pytest.raises(UnsupportedParameter, match=f"'{kind}'") as refused:
            chat(tools=only, tool_choice=choice)
        assert refused.value.param == f"tools[{len(only) - 1}].type"


def test_a_hosted_tool_is_refused_where_the_operator_says_so() -> None:
    body = orjson.dumps({"model": "m", "input": "Hi", "tools": [FUNCTION, {"type": "mcp"}]})
    with pytest.raises(UnsupportedParameter, match="=mcp") as refused:
        parse(ResponseRequest, body, strict=True)
    assert refused.value.param == "tools[1].type"


def test_of_many_hosted_tools_the_first_types_are_named() -> None:
    same = [{"type": "web_search"}] * 100
    assert hints(tools=same) == ("tools[0].type=web_search",)
    others = [{"type": f"t{n}"} for n in range(100)]
    assert hints(tools=others) == tuple(f"tools[{n}].type=t{n}" for n in range(64))
    assert hints(tools=[{"type": "x" * 100}]) == (f"tools[0].type={'x' * 64}",)


@pytest.mark.parametrize(
    "item",
    [FOUND, {"type": "additional_tools", "role": "developer", "tools": [POSTGRES]}],
)
def test_tools_that_items_bring_can_be_called(item: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "query", "arguments": "{}"}
    call |= {"namespace": "mcp__pg"}
    items = [QUESTION, SEARCH_CALL, item, call]
    wanted = chat(input=items, tools=[SEARCH])
    assert names(wanted) == ["tool_search", "mcp__pg__query"]
    assert wanted.called_tools["mcp__pg__query"].namespace == "mcp__pg"
    choice = {"type": "function", "name": "query", "namespace": "mcp__pg"}
    chosen = chat(input=items, tool_choice=choice | {"strict": True}).forced_call
    assert chosen is not None
    assert chosen.name == "mcp__pg__query"
    required = chat(input=items, tool_choice="required")
    assert [name for _, name in required.build_guide_parts()] == [
        "input[2].tools[0].tools[0].parameters"
    ]


def test_a_search_and_what_it_found_is_in_the_prompt() -> None:
    messages = chat(input=[QUESTION, SEARCH_CALL, FOUND], tools=[SEARCH]).messages
    assert [(m.role, m.content) for m in messages] == [
        ("user", "Hi"),
        ("assistant", ""),
        ("tool", "Tools that can be called now: mcp__pg__query"),
    ]
    [call] = messages[1].tool_calls or []
    assert (call.id, messages[2].tool_call_id) == ("s1", "s1")
    server = [SEARCH_CALL | {"call_id": None}, FOUND | {"call_id": None, "tools": []}]
    messages = chat(input=[QUESTION, *server]).messages
    assert messages[2].content == "No tools found."
    assert messages[2].tool_call_id == (messages[1].tool_calls or [])[0].id


def test_a_tool_that_is_found_again_is_the_one_that_was_known() -> None:
    other = POSTGRES | {"tools": [QUERY | {"description": "Another"}]}
    wanted = chat(input=[QUESTION, SEARCH_CALL, FOUND | {"tools": [other]}], tools=[POSTGRES])
    [tool] = wanted.tools or []
    assert tool.function.description == "A database\n\nRuns SQL"


def test_a_search_without_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no call 's1'") as refused:
        chat(input=[QUESTION, FOUND])
    assert refused.value.param == "input[1].call_id"


@pytest.mark.parametrize("arguments", ['{"query": "sql", "limit": 3}', "{}", '{"query'])
def test_a_search_is_an_item_that_the_client_executes(arguments: str) -> None:
    events = tuple(call_events("tool_search", arguments, call_id="c1"))
    deltas = [TextDelta("", 1, "stop", events=events)]
    [item] = complete_answer(deltas, tools=[SEARCH])["output"]
    assert stream_answer(deltas, tools=[SEARCH])["output"] == [item]
    assert (item["type"], item["execution"], item["call_id"]) == (
        *("tool_search_call", "client"),
        "c1",
    )
    told = json.loads(arguments) if arguments.endswith("}") else arguments
    assert item["arguments"] == told
    [call] = chat(input=[QUESTION, item], tools=[SEARCH]).messages[1].tool_calls or []
    assert call.function.arguments.replace(" ", "") == arguments.replace(" ", "")  # type: ignore[union-attr]


@pytest.mark.parametrize("execution", [None, "server"])
def test_a_search_by_the_server_has_nothing_left_to_find(execution: str | None) -> None:
    deferred = QUERY | {"defer_loading": True}
    tools = [deferred, SEARCH | {"execution": execution}]
    assert names(chat(tools=tools)) == ["query"]
    assert hints(tools=tools) == ("tools[1].type=tool_search",)


def test_tools_are_counted_with_those_of_namespaces_and_items() -> None:
    def space(count: int) -> dict[str, Any]:
        return POSTGRES | {"tools": [QUERY | {"name": f"q{n}"} for n in range(count)]}

    assert len(names(chat(tools=[space(MAX_TOOLS)]))) == MAX_TOOLS
    found = [QUESTION, SEARCH_CALL, FOUND]
    for fields in (
        {"tools": [space(MAX_TOOLS), FUNCTION]},
        {"tools": [space(MAX_TOOLS)], "input": found},
        {"tools": [space(MAX_TOOLS), {"type": "web_search"}]},
    ):
        with pytest.raises(InvalidRequest, match=f"^tools: found more than {MAX_TOOLS}"):
            chat(**fields)


def test_the_same_name_is_no_function_and_a_custom_tool() -> None:
    both = POSTGRES | {"tools": [QUERY, PATCH | {"name": "query"}]}
    with pytest.raises(InvalidRequest, match="type function") as refused:
        chat(tools=[both])
    assert refused.value.param == "tools[0].tools[1].name"
    assert names(chat(tools=[POSTGRES, PATCH | {"name": "query"}])) == ["mcp__pg__query", "query"]


def test_a_tool_of_an_earlier_item_is_at_fault_with_its_conversation() -> None:
    earlier = parse_items([SEARCH_CALL, FOUND | {"tools": [PATCH | {"name": "f"}]}])
    asked = chat(tools=[FUNCTION]).original
    with pytest.raises(InvalidRequest, match="type function") as refused:
        build_chat(asked, [*earlier, *asked.items])
    assert refused.value.param == "conversation.tools[0].name"


def test_a_response_tells_namespaces_again() -> None:
    deltas = [TextDelta("x", 1, "stop")]
    [told] = complete_answer(deltas, tools=[POSTGRES])["tools"]
    assert (told["name"], told["tools"][0]["name"]) == ("mcp__pg", "query")


def test_a_namespace_costs_by_its_length_alone() -> None:
    """A description of a namespace is in the prompt once, not once for each of its tools."""
    long = "x" * 4096
    tools = [{"type": "function", "name": f"q{n}"} for n in range(MAX_TOOLS)]
    wanted = chat(tools=[POSTGRES | {"description": long, "tools": tools}])
    found = [tool.function.description for tool in wanted.tools or []]
    assert sum(map(len, itertools.chain(filter(None, found)))) == len(long)


@pytest.mark.parametrize("depth", [91, 97, 300, 5000])
def test_a_search_too_deep_for_a_request_is_text(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    events = tuple(call_events("tool_search", arguments, call_id="c1"))
    [item] = complete_answer([TextDelta("", 1, "stop", events=events)], tools=[SEARCH])["output"]
    assert item["arguments"] == arguments
    chat(input=[QUESTION, item], tools=[SEARCH])


def test_a_search_as_deep_as_a_request_can_hold_is_an_object() -> None:
    arguments = '{"a":' * 90 + "1" + "}" * 90
    events = tuple(call_events("tool_search", arguments, call_id="c1"))
    [item] = complete_answer([TextDelta("", 1, "stop", events=events)], tools=[SEARCH])["output"]
    assert item["arguments"] == json.loads(arguments)
    chat(input=[QUESTION, item], tools=[SEARCH])


def test_only_calls_that_can_be_made_have_names() -> None:
    tools = [POSTGRES, PATCH]
    assert {*chat(tools=tools).called_tools} == {"mcp__pg__query", "query", "apply_patch"}
    assert not chat(tools=tools, tool_choice="none").called_tools
    narrow = allowed({"type": "custom", "name": "apply_patch"})
    assert list(chat(tools=tools, tool_choice=narrow).called_tools) == ["apply_patch"]


def test_a_bare_name_is_the_tools_of_its_namespace_unless_another_tool_has_it() -> None:
    called = chat(tools=[POSTGRES]).called_tools
    assert called["query"] == called["mcp__pg__query"]
    for other in (MYSQL, QUERY):
        assert "query" not in chat(tools=[POSTGRES, other]).called_tools
        alone = allowed({"type": "namespace", "name": "mcp__pg"})
        assert "query" not in chat(tools=[POSTGRES, other], tool_choice=alone).called_tools


@pytest.mark.parametrize("kind", ["functon", "Function", "functions", "fucntion", "cutsom"])
def test_a_tool_of_a_misspelled_type_is_refused(kind: str) -> None:
    slip, meant = FUNCTION | {"type": kind}, "custom" if kind == "cutsom" else "function"
    for tools, where in (([slip], "tools[0]"), ([POSTGRES | {"tools": [slip]}], "tools[0].tools")):
        with pytest.raises(InvalidRequest, match=f"'{kind}'; did you mean {meant}") as refused:
            chat(tools=tools)
        assert (refused.value.param or "").startswith(where)
    brought = {"type": "additional_tools", "role": "developer", "tools": [slip]}
    assert names(chat(input=[QUESTION, brought], tools=[QUERY])) == ["query"]


def test_an_allowed_hosted_tool_is_no_function_of_its_name() -> None:
    tools = [FUNCTION | {"name": "web_search"}, FUNCTION, {"type": "web_search"}]
    wanted = chat(tools=tools, tool_choice=allowed(FUNCTION, {"type": "web_search"}))
    assert names(wanted) == ["f"]
    with pytest.raises(UnsupportedParameter, match="web_search"):
        chat(tools=tools, tool_choice=allowed({"type": "web_search"}))


def test_a_wrong_namespace_is_refused_with_the_known_ones() -> None:
    spaces = [POSTGRES | {"name": f"s{n}"} for n in range(9)]
    choice = {"type": "function", "name": "query", "namespace": "pg\n" * 99}
    with pytest.raises(InvalidRequest) as refused:
        chat(tools=spaces, tool_choice=choice)
    assert refused.value.param == "tool_choice.namespace"
    message = refused.value.message
    assert "not the name of a namespace; allowed: s0, s1, s2, s3, s4, s5, s6, s7, ..." in message
    assert len(message) < 300


def test_an_allowed_namespace_may_come_twice_and_hold_hosted_tools_alone() -> None:
    space = {"type": "namespace", "name": "mcp__pg"}
    hosted = {"type": "namespace", "name": "h", "description": "", "tools": [{"type": "mcp"}]}
    choice = allowed(space, space, {"type": "namespace", "name": "h"})
    assert names(chat(tools=[POSTGRES, hosted, FUNCTION], tool_choice=choice)) == ["mcp__pg__query"]
    with pytest.raises(InvalidRequest, match="not the name of a namespace; allowed: mcp__pg"):
        chat(tools=[POSTGRES], tool_choice=allowed({"type": "namespace", "name": "h"}))


@pytest.mark.parametrize("given", [{}, {"previous_response_id": "resp_1"}])
def test_tools_alone_continue_a_conversation(given: dict[str, str]) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION, PATCH]}
    items = [more] if given else [QUESTION, more]
    wanted = chat(input=items, **given)
    assert names(wanted) == ["f", "apply_patch"]
    assert wanted.tool_paths[0] == f"input[{len(items) - 1}].tools[0]"


def test_hosted_tools_that_are_brought_again_count_once() -> None:
    more = {"type": "additional_tools", "tools": [FUNCTION, {"type": "web_search"}]}
    assert names(chat(input=[QUESTION, *[more] * (MAX_TOOLS + 1)])) == ["f"]


def test_the_output_of_a_search_by_the_server_follows_one() -> None:
    found = FOUND | {"call_id": None, "execution": "server"}
    call = SEARCH_CALL | {"call_id": None, "execution": "server"}
    chat(input=[QUESTION, call, found])
    for items in ([found], [found, call], [SEARCH_CALL, found]):
        with pytest.raises(InvalidRequest, match="no search without a call_id") as refused:
            chat(input=[QUESTION, *items])
        assert refused.value.param == f"input[{1 + items.index(found)}].call_id"


def test_searches_of_the_server_end_with_their_outputs() -> None:
    found = FOUND | {"call_id": None, "execution": "server"}
    call = SEARCH_CALL | {"call_id": None, "execution": "server"}
    items = chat(input=[QUESTION, call, found, QUESTION, call, call, found, found, QUESTION])
    assert _find_cuts(items.original.items, 0) == [1, 3, 4, 8]


@pytest.mark.parametrize("missing", ["syntax", "definition"])
def test_a_grammar_is_given_with_its_format(missing: str) -> None:
    full = PATCH["format"]
    assert isinstance(full, dict)
    tool = PATCH | {"format": {k: v for k, v in full.items() if k != missing}}
    with pytest.raises(InvalidRequest, match="ield required") as refused:
        chat(tools=[tool])
    assert refused.value.param == f"tools[0].format.{missing}"


def test_two_schemas_under_one_name_are_refused() -> None:
    other = FUNCTION | {"parameters": {"type": "object"}}
    with pytest.raises(InvalidRequest, match="another schema") as refused:
        chat(tools=[FUNCTION, other])
    assert refused.value.param == "tools[1].parameters"
    twice = [
        POSTGRES,
        POSTGRES | {"tools": [t | {"parameters": {"title": "x"}} for t in POSTGRES["tools"]]},
    ]
    with pytest.raises(InvalidRequest, match="another schema") as refused:
        chat(tools=twice)
    assert refused.value.param == "tools[1].tools[0].parameters"
