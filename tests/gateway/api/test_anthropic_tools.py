"""Tools of the Messages API, their results, and the client's self-description in `system`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.api.anthropic.requests import MessagesChat, MessagesRequest, parse
from gateway.errors import InvalidRequest, UnsupportedParameter
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

QUESTION = {"role": "user", "content": "Hi"}
BODY = {"model": "m", "max_tokens": 9, "messages": [QUESTION]}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "1"}
F: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
SEARCHED = {"type": "tool_use", "id": "s1", "name": "search", "input": {}}
REFERENCE = {"type": "tool_reference", "tool_name": "f"}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    {"type": "web_fetch_20260209", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "pg"},
]
FACTS = "x-anthropic-billing-header: cc_version=2.1.332.a1b; cc_entrypoint=cli; cch="


def chat(**fields: Any) -> MessagesChat:
    return parse(MessagesRequest, orjson.dumps(BODY | fields)).request


def names(wanted: MessagesChat) -> list[str]:
    return [tool.function.name for tool in wanted.tools or []]


def hints(*, strict: bool = False, **fields: Any) -> tuple[str, ...]:
    return parse(MessagesRequest, orjson.dumps(BODY | fields), strict=strict).hints


def called(*results: dict[str, Any], use: dict[str, Any] = USE) -> list[dict[str, Any]]:
    said = {"role": "assistant", "content": [use]}
    return [QUESTION, said, {"role": "user", "content": [*results]}]


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_a_tool_that_only_anthropic_knows_is_left_out_and_named(tool: dict[str, Any]) -> None:
    assert names(chat(tools=[tool, F])) == ["f"]
    named = f"tools.0.type={tool['type']}"
    assert hints(tools=[tool, F]) == (named,)
    assert hints(tools=[tool]) == (named,)
    assert hints(tools=[tool, F], tool_choice={"type": "any"}) == (named,)
    with pytest.raises(UnsupportedParameter, match=named) as refused:
        hints(tools=[tool, F], strict=True)
    assert refused.value.param == "tools.0.type"


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_it_is_refused_where_a_choice_demands_it(tool: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter, match=tool["type"]) as refused:
        chat(tools=[tool], tool_choice={"type": "any"})
    assert refused.value.param == "tools.0.type"
    if name := tool.get("name"):
        with pytest.raises(UnsupportedParameter, match=tool["type"]) as refused:
            chat(tools=[F, tool], tool_choice={"type": "tool", "name": name})
        assert refused.value.param == "tools.1.type"


def test_a_schemas_place_counts_the_tools_that_are_left_out() -> None:
    wanted = chat(tools=[HOSTED[0], F], tool_choice={"type": "any"})
    assert [param for _, param in wanted.build_guide_parts()] == ["tools.1.input_schema"]


def test_a_tool_with_a_schema_is_the_clients_whatever_its_type() -> None:
    wanted = chat(tools=[F | {"type": "bash_20250124"}, {"type": "bash_20250124", "name": "b"}])
    assert [tool.function.name for tool in wanted.tools or []] == ["f"]


@pytest.mark.parametrize("tools", [[{"input_schema": {}}], [{"type": "custom", "name": "f"}]])
def test_a_tool_of_the_client_has_a_name_and_a_schema(tools: list[Any]) -> None:
    missing = "name" if "name" not in tools[0] else "input_schema"
    with pytest.raises(InvalidRequest, match="Field required") as refused:
        chat(tools=tools)
    assert refused.value.param == f"tools.0.{missing}"


def test_more_tools_than_openai_takes() -> None:
    tools = [F | {"name": f"f{n}"} for n in range(1025)]
    assert len(names(chat(tools=tools[:1024], tool_choice={"type": "any"}))) == 1024
    with pytest.raises(InvalidRequest, match=r"^tools: .* at most 1024"):
        chat(tools=tools)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [RESULT]}],
        called(RESULT, use=USE | {"id": "t2"}),
        [{"role": "user", "content": [RESULT]}, *called()[:2], QUESTION],
    ],
)
def test_a_result_without_its_call_is_refused_by_its_place(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="no tool_use 't1' comes before") as refused:
        chat(messages=messages)
    at = 0 if messages[0] != QUESTION else 2
    assert refused.value.param == f"messages.{at}.content.0.tool_use_id"


def test_a_tool_that_was_found_is_named_in_the_result() -> None:
    found = {"type": "text", "text": "Found:"}
    result = {"type": "tool_result", "tool_use_id": "s1", "content": [found, REFERENCE]}
    deferred = F | {"defer_loading": True}
    wanted = chat(messages=called(result, use=SEARCHED), tools=[deferred])
    assert names(wanted) == ["f"]
    assert wanted.messages[-1].content == "Found:\nThe tool f can be called now."


def test_a_reference_to_a_tool_that_is_not_there_says_so() -> None:
    result = {"type": "tool_result", "tool_use_id": "s1", "content": [REFERENCE]}
    wanted = chat(messages=called(result, use=SEARCHED), tools=[HOSTED[0] | {"name": "f"}])
    assert wanted.messages[-1].content == "The tool f cannot be called now."


def test_what_a_client_says_of_itself_is_no_part_of_the_prompt() -> None:
    def system(*texts: str) -> list[Any]:
        blocks = [{"type": "text", "text": text} for text in texts]
        return [message.content for message in chat(system=blocks).messages][:-1]

    assert system(FACTS + "1;", "You are") == ["You are"]
    assert system("You are", FACTS + "2;") == ["You are"]
    assert system(FACTS) == []
    for other in (f" {FACTS}", f"See {FACTS}", "x-anthropic-billing", FACTS.upper()):
        assert system(other) == [other]
    assert chat(system=FACTS).messages[0].content == FACTS
    spoken = {"role": "user", "content": [{"type": "text", "text": FACTS}]}
    assert chat(messages=[spoken]).messages[0].content == FACTS
    reminder = {"role": "system", "content": [{"type": "text", "text": FACTS}]}
    assert chat(messages=[QUESTION, reminder]).messages[1].content == FACTS


async def test_prompts_are_alike_and_counted_alike_whatever_it_says(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"eos_token": "!", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    servicer = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    prompts, counts = set(), set()
    async with serving(servicer) as endpoint, running(tmp_path, endpoint) as (client, _, _):
        for facts in ("1", "two"):
            texts = (FACTS + facts, "You are")
            system = [{"type": "text", "text": text} for text in texts]
            told = await client.post("/v1/messages", json=BODY | {"system": system})
            assert told.status_code == 200, told.text
            counting = {"model": "m", "messages": [QUESTION], "system": system}
            counted = await client.post("/v1/messages/count_tokens", json=counting)
            counts.add(counted.json()["input_tokens"])
            request = servicer.requests[-1]
            at = [tensor.name for tensor in request.inputs].index("input_ids")
            prompts.add(request.raw_input_contents[at])
    assert len(prompts) == 1
    assert counts == {len("You areHi")}


async def test_what_is_left_out_is_named_in_a_header(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    template = "{{ tools | tojson }}<tool_call>"
    config = {"eos_token": "!", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    servicer = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    wild = {"type": "x\r\nset-cookie: a=b", "name": "wild"}
    async with (
        serving(servicer) as endpoint,
        running(tmp_path, endpoint, max_seq_len=512, tool_form="hermes") as (client, _, _),
    ):
        told = await client.post("/v1/messages", json=BODY | {"tools": [*HOSTED[:1], wild, F]})
    assert told.status_code == 200, told.text
    first, second = told.headers["x-ignored-parameters"].split(", ")
    assert first == "tools.0.type=web_search_20250305"
    assert second == r"tools.1.type=x\u000d\u000aset-cookie:\u0020a=b"
    assert "set-cookie" not in told.headers


def test_two_schemas_under_one_name_are_refused() -> None:
    other = F | {"input_schema": {"type": "string"}}
    with pytest.raises(InvalidRequest, match="another schema") as refused:
        chat(tools=[HOSTED[0], F, other])
    assert refused.value.param == "tools.2.input_schema"
