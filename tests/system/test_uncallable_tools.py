"""`tool_choice: none` in each protocol: same prompt as `auto`, and the answer has no call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from ops.commands.up import DEMO_MODEL
from tests.support.in_process import running
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOKENS_PER_BLOCK = 32
FUNCTION = {"name": "get_weather", "description": "Get the weather in a city"}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
BASE: dict[str, Any] = {"model": "demo", "temperature": 0}


class Protocol(NamedTuple):
    """A request with a tool, the choice that forbids calls, and the path of the answer's text."""

    path: str
    body: dict[str, Any]
    none: Any
    input_tokens: str


PROTOCOLS = {
    "chat": Protocol(
        "/v1/chat/completions",
        BASE
        | {
            "messages": ASKED,
            "tools": [{"type": "function", "function": FUNCTION | {"parameters": SCHEMA}}],
        },
        "none",
        "prompt_tokens",
    ),
    "responses": Protocol(
        "/v1/responses",
        BASE
        | {
            "input": ASKED,
            "store": False,
            "tools": [FUNCTION | {"type": "function", "parameters": SCHEMA}],
        },
        "none",
        "input_tokens",
    ),
    "messages": Protocol(
        "/v1/messages",
        BASE
        | {
            "messages": ASKED,
            "max_tokens": 60,
            "tools": [FUNCTION | {"input_schema": SCHEMA}],
        },
        {"type": "none"},
        "input_tokens",
    ),
}
each_protocol = pytest.mark.parametrize("name", PROTOCOLS)


def _ask(client: httpx.Client, protocol: Protocol, **fields: Any) -> dict[str, Any]:
    answer = client.post(protocol.path, json=protocol.body | fields, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _text(answer: dict[str, Any]) -> str:
    """Return the answer's text. Fail if the answer has any other item."""
    if "choices" in answer:
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        return str(choice["message"]["content"])
    if "output" in answer:
        [item] = answer["output"]
        [part] = item["content"]
        assert (item["type"], answer["status"]) == ("message", "completed")
        return str(part["text"])
    [block] = answer["content"]
    assert (block["type"], answer["stop_reason"]) == ("text", "end_turn")
    return str(block["text"])


def _prompt_tokens(protocol: Protocol, answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage[protocol.input_tokens]) + int(usage.get("cache_read_input_tokens") or 0)


def _cached_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


@each_protocol
def test_none_keeps_the_prompt_and_reads_no_call(stack: Stack, name: str) -> None:
    protocol = PROTOCOLS[name]
    with httpx.Client(base_url=stack.gateway) as client:
        called = _ask(client, protocol)
        told = _ask(client, protocol, tool_choice=protocol.none)
    assert _prompt_tokens(protocol, told) == _prompt_tokens(protocol, called)
    # The cache has all complete blocks of the prompt except the block of its last token.
    assert _cached_tokens(told) >= _prompt_tokens(protocol, told) - 2 * TOKENS_PER_BLOCK
    # The demo model writes a call whenever it sees a tool. Here that stays unparsed text.
    assert '"get_weather"' in _text(told)


@each_protocol
async def test_a_setting_removes_the_tools(stack: Stack, tmp_path: Path, name: str) -> None:
    protocol = PROTOCOLS[name]
    fields: dict[str, Any] = {
        "tokenizer_dir": DEMO_MODEL,
        "model_name": "demo",
        "max_seq_len": None,
        "exclude_tools_when_tool_choice_none": True,
    }
    bare = {name: value for name, value in protocol.body.items() if name != "tools"}
    async with running(tmp_path, stack.triton_grpc, **fields) as (client, _, _):
        told = await client.post(protocol.path, json=protocol.body | {"tool_choice": protocol.none})
        without = await client.post(protocol.path, json=bare)
    assert _prompt_tokens(protocol, told.json()) == _prompt_tokens(protocol, without.json())
    assert "get_weather" not in _text(told.json())
