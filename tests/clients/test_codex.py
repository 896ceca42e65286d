"""Requests in the shape that Codex has them: long instructions, many tools, patches as text."""

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

# Its model thinks in tags, calls tools in hermes' form and knows one system message only.
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
"""Of the instructions, each a token or more."""


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
        # A client may keep of thoughts no more than what a server that stores nothing needs.
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
