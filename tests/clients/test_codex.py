"""Requests like Codex': long instructions, many tools, patches as text."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai._streaming import SSEDecoder
from tokenizers import Tokenizer

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

# A model with reasoning in tags and hermes tool calls, whose template allows one system message.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}{{ '\n' }}{% endfor %}{{ tools | tojson }}[assistant]"
)
PATCH = "*** Begin Patch\n*** Add File: a.py\n+print('🦉')\n*** End Patch"
APPLY_PATCH = {"description": "Edits files", "name": "apply_patch"}
AS_CUSTOM = APPLY_PATCH | {
    "type": "custom",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
}
AS_FUNCTION = APPLY_PATCH | {
    "type": "function",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    },
}
WORDS = 20_000
"""Number of words in the instructions. Each word is at least one token."""


def _tools(patch: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    others = [
        {"type": "function", "name": f"tool_{n}", "strict": False, "parameters": parameters}
        for n in range(29)
    ]
    return [*others, patch]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _body(items: list[dict[str, Any]], patch: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m",
        "instructions": "word " * WORDS,
        "input": items,
        "tools": _tools(patch),
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-a",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


async def _asked(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    told = await client.post("/v1/responses", json=body)
    assert told.status_code == 200, told.text
    return [event.json() for event in SSEDecoder().iter_bytes(iter([told.content]))]


@pytest.mark.parametrize("patch", [AS_CUSTOM, AS_FUNCTION], ids=["custom", "function"])
async def test_a_turn_with_a_patch(folder: Path, patch: dict[str, Any]) -> None:
    call = {"name": "apply_patch", "arguments": {"input": PATCH}}
    written = f"<think>a file</think><tool_call>{json.dumps(call)}</tool_call>"
    items = [
        _message("developer", "<permissions>all</permissions>"),
        _message("user", "<environment_context/>"),
        _message("user", "Add a.py"),
    ]
    servicer = FakeTriton(tokens=ids_of(folder, written), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, max_seq_len=200_000, tool_form="hermes") as (client, _, _),
    ):
        events = await _asked(client, _body(items, patch))
        servicer.tokens = ids_of(folder, "done")
        thoughts, called = events[-1]["response"]["output"]
        # A client may drop all of a reasoning item except the encrypted content.
        thoughts = {"type": "reasoning", "encrypted_content": thoughts["encrypted_content"]}
        output = {"call_id": called["call_id"], "output": "Success"}
        more = [
            *(*items, thoughts, called),
            {"type": f"{called['type']}_output"} | output,
            _message("developer", "<permissions>none</permissions>"),
        ]
        last = await _asked(client, _body(more, patch))
    told = [event["delta"] for event in events if "reasoning_summary_text.delta" in event["type"]]
    assert "".join(told) == "a file"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", called["type"]]
    if patch is AS_CUSTOM:
        assert called["input"] == PATCH
    else:
        assert json.loads(called["arguments"]) == {"input": PATCH}
    assert last[-1]["response"]["output"][0]["content"][0]["text"] == "done"
    assert last[-1]["response"]["usage"]["input_tokens"] > WORDS
    prompt = _prompt(folder, servicer)
    assert prompt.startswith("[system]" + "word " * WORDS + "\n<permissions>all</permissions>\n")
    assert "[user]<environment_context/>\nAdd a.py\n[assistant]<think>a file</think>" in prompt
    assert "<tool_call>" in prompt.partition("[assistant]")[2]
    assert "[tool]Success\n[user]<permissions>none</permissions>\n" in prompt
    assert ('start: \\"*** Begin Patch\\"' in prompt) is (patch is AS_CUSTOM)


def _prompt(folder: Path, servicer: FakeTriton) -> str:
    request = servicer.requests[-1]
    names = [tensor.name for tensor in request.inputs]
    ids = array("i", request.raw_input_contents[names.index("input_ids")])
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(list(ids))
    return text


SPAWN = {"type": "function", "name": "spawn_agent", "strict": False, "parameters": {}}
QUERY = {
    "type": "function",
    "name": "query",
    "description": "Runs SQL",
    "strict": False,
    "defer_loading": True,
    "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}},
}
POSTGRES = {"type": "namespace", "name": "mcp__pg", "description": "Tools", "tools": [QUERY]}
DEFAULTS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents", "tools": [SPAWN]},
    {"type": "tool_search", "execution": "client", "description": "Finds", "parameters": {}},
    {"type": "web_search", "external_web_access": False},
]
"""Tools of Codex' default configuration besides its own functions."""
NAMED = {"namespace": "mcp__pg", "name": "query"}


def _call(name: str, **arguments: str) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{written}</tool_call>"


async def test_a_tool_of_a_namespace_is_searched_and_called(folder: Path) -> None:
    items = [_message("user", "How many?")]
    servicer = FakeTriton(tokens=[], fault=None, step=0)
    body = _body(items, AS_CUSTOM) | {"instructions": "word"}
    body["tools"] += DEFAULTS
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, max_seq_len=32_768, tool_form="hermes") as (client, _, _),
    ):
        servicer.tokens = ids_of(folder, _call("tool_search", query="sql"))
        told = await client.post("/v1/responses", json=body)
        assert told.status_code == 200, told.text
        assert (
            told.headers["x-ignored-parameters"]
            == "text.verbosity, tools[32].type=web_search, tools.format"
        )
        [search] = (await _asked(client, body))[-1]["response"]["output"]
        assert (search["type"], search["execution"]) == ("tool_search_call", "client")
        assert search["arguments"] == {"query": "sql"}
        found = {"type": "tool_search_output", "execution": "client", "status": "completed"}
        found |= {"call_id": search["call_id"], "tools": [POSTGRES]}
        items += [search, found]
        servicer.tokens = ids_of(folder, _call("mcp__pg__query", sql="select 1"))
        events = await _asked(client, body | {"input": items})
        [called] = events[-1]["response"]["output"]
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "1"}
        servicer.tokens = ids_of(folder, "done")
        last = await _asked(client, body | {"input": [*items, called, output]})
    assert last[-1]["type"] == "response.completed"
    assert {name: called[name] for name in NAMED} == NAMED
    assert json.loads(called["arguments"]) == {"sql": "select 1"}
    for event in events:
        if event["type"].startswith("response.output_item."):
            assert {name: event["item"][name] for name in NAMED} == NAMED
        if event["type"].endswith("arguments.done"):
            assert event["name"] == "query"
    prompt = _prompt(folder, servicer)
    assert '<tool_call>{"name": "tool_search", "arguments": {"query": "sql"}}</tool_call>' in prompt
    assert "[tool]Tools that can be called now: mcp__pg__query" in prompt
    assert '<tool_call>{"name": "mcp__pg__query", "arguments": {"sql": "select 1"}}' in prompt
    assert '"name": "multi_agent_v1__spawn_agent"' in prompt
    assert "web_search" not in prompt


@pytest.mark.parametrize("way", ["previous_response_id", "conversation", "background"])
async def test_what_is_kept_brings_its_tools(folder: Path, way: str) -> None:
    items = [
        _message("user", "How many?"),
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "execution": "client", "tools": [POSTGRES]},
    ]
    servicer = FakeTriton(tokens=[], fault=None, step=0)
    body: dict[str, Any] = {"model": "m", "input": items, "stream": True}
    body["background"] = way == "background"
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED | {"type": "function"}]}
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, max_seq_len=4096, tool_form="hermes") as (client, _, _),
    ):
        if way == "conversation":
            body["conversation"] = (await client.post("/v1/conversations", json={})).json()["id"]
        servicer.tokens = ids_of(folder, _call("mcp__pg__query", sql="select 1"))
        first = (await _asked(client, body))[-1]["response"]
        kept = (await client.get(f"/v1/responses/{first['id']}")).json()
        [called] = kept["output"]
        assert {name: called[name] for name in NAMED} == NAMED
        listed = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
        assert [item["type"] for item in listed] == [item["type"] for item in reversed(items)]
        assert listed[0]["tools"][0]["tools"][0]["name"] == "query"
        goes_on = {name: body[name] for name in ("model", "conversation") if name in body}
        if way != "conversation":
            goes_on["previous_response_id"] = first["id"]
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "1"}
        goes_on |= {"input": [output], "tool_choice": chosen}
        second = await client.post("/v1/responses", json=goes_on)
        assert second.status_code == 200, second.text
        [again] = second.json()["output"]
        assert {name: again[name] for name in NAMED} == NAMED
        unknown = goes_on | {"tool_choice": {"type": "function", "name": "x"}}
        refused = (await client.post("/v1/responses", json=unknown)).json()["error"]
        assert refused["param"] == "tool_choice.name"
    prompt = _prompt(folder, servicer)
    assert prompt.count('"name": "mcp__pg__query"') == 2  # the definition and the call
    assert "[tool]1" in prompt


async def test_tools_outlast_the_items_that_brought_them(folder: Path) -> None:
    found = {"type": "tool_search_output", "call_id": "s", "execution": "client"}
    items = [
        _message("user", "How many?"),
        {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {}},
        found | {"tools": [POSTGRES]},
        _message("assistant", "x" * 2000),
        _message("user", "And now?"),
    ]
    body = {"model": "m", "input": items, "truncation": "auto", "max_output_tokens": 64}
    servicer = FakeTriton(tokens=ids_of(folder, "done"), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, max_seq_len=1500, tool_form="hermes") as (client, _, _),
    ):
        told = await client.post("/v1/responses", json=body)
    assert told.status_code == 200, told.text
    prompt = _prompt(folder, servicer)
    assert prompt.startswith("[user]And now?")
    assert '"name": "mcp__pg__query"' in prompt
