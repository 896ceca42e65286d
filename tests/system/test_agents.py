"""Requests like those of coding agents: 20,000 tokens of instructions, 30 tools, several turns.

The synthetic engine answers each request with the same tool call, as fast as it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.cluster import core_repository, tritons_of
from tests.support.gateway_process import GatewayProcess
from tests.support.triton_server import MODEL
from triton_repo.cpu_executor import synthetic

pytestmark = pytest.mark.slow

_TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
ARGUMENTS = {"command": "ls -la src"}
SAID = '<tool_call>\n{"name": "tool_7", "arguments": ' + json.dumps(ARGUMENTS) + "}\n</tool_call>"
INSTRUCTIONS = "You are a careful engineer. Read before you write.\n" * 1600
TURNS = 3


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("agents")
    end = _TOKENIZER.token_to_id("<|im_end|>")
    engine = synthetic.build(
        folder / "engine",
        vocab_size=4096,
        tokens=[*_TOKENIZER.encode(SAID).ids, end],
        tokens_per_second=10_000,
        first_token_ms=0,
        max_seq_len=65_536,
    )
    with (
        tritons_of(folder, core_repository(engine), 1) as one,
        GatewayProcess(folder / "gateway", one) as process,
        process.client() as client,
    ):
        assert len(_TOKENIZER.encode(INSTRUCTIONS).ids) > 20_000
        yield client


def _schema(number: int) -> dict[str, Any]:
    """Return a JSON schema in the style of agents' tools: nested, with long descriptions."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": f"What tool {number} does. " * 20},
            "timeout": {"type": "number", "minimum": 0, "maximum": 600_000},
            "edits": {
                "type": "array",
                "items": {"type": "object", "properties": {"old": {"type": "string"}}},
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    }


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_as_claude_code(gateway: httpx.Client) -> None:
    """Check `/v1/messages?beta=true` with cache_control, thinking, beta headers, tool results."""
    tools = [
        {
            "name": f"tool_{n}",
            "description": f"Runs command {n}. " * 30,
            "input_schema": _schema(n),
            "eager_input_streaming": True,
        }
        for n in range(30)
    ]
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    asked: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 32_000,
        "temperature": 1,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-header: version=2.1; entrypoint=cli"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": INSTRUCTIONS, **cached},
        ],
        "tools": tools,
        "metadata": {"user_id": "user_0_account_0_session_0"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "messages": [],
    }
    headers = {
        "x-api-key": "none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
    }
    reminder = {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"}
    turn: list[dict[str, Any]] = [reminder, {"type": "text", "text": "List the sources."}]
    read = 0
    for _ in range(TURNS):
        asked["messages"].append({"role": "user", "content": turn})
        counted = {name: asked[name] for name in ("model", "system", "tools", "messages")}
        count = gateway.post("/v1/messages/count_tokens", json=counted, headers=headers).json()
        events = _events(gateway.post("/v1/messages?beta=true", json=asked, headers=headers))
        start, *_, ended, stop = events
        assert (start["type"], stop["type"]) == ("message_start", "message_stop")
        assert ended["delta"]["stop_reason"] == "tool_use"
        usage = ended["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
        assert count["input_tokens"] > max(20_000, read)
        read = count["input_tokens"]
        [block] = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        parts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        assert (block["type"], block["name"]) == ("tool_use", "tool_7")
        assert json.loads("".join(part["partial_json"] for part in parts)) == ARGUMENTS
        asked["messages"].append({"role": "assistant", "content": [block | {"input": ARGUMENTS}]})
        output = [{"type": "text", "text": "main.py\nutil.py"}]
        turn = [{"type": "tool_result", "tool_use_id": block["id"], "content": output, **cached}]
        turn.append(reminder)


def test_as_codex(gateway: httpx.Client) -> None:
    """Check stateless `/v1/responses`: developer messages, a custom tool, reasoning items."""
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "name": f"tool_{n}",
            "description": f"Runs command {n}. " * 30,
            "strict": False,
            "parameters": _schema(n),
        }
        for n in range(29)
    ]
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    asked: dict[str, Any] = {
        "model": "demo",
        "instructions": INSTRUCTIONS,
        "input": [
            _said("developer", "<permissions>read only</permissions>"),
            _said("developer", "<collaboration_mode>default</collaboration_mode>"),
            _said("user", "<environment_context>/src</environment_context>"),
            _said("user", "List the sources."),
        ],
        "tools": [*tools, patch],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199c0de",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "0"},
    }
    headers = {
        "authorization": "Bearer none",
        "originator": "codex_cli_rs",
        "session-id": "0199c0de",
        "x-codex-turn-state": "0",
        "accept": "text/event-stream",
    }
    read = 0
    for _ in range(TURNS):
        counted = {name: asked[name] for name in ("model", "instructions", "tools", "input")}
        count = gateway.post("/v1/responses/input_tokens", json=counted, headers=headers).json()
        events = _events(gateway.post("/v1/responses", json=asked, headers=headers))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
        answered = events[-1]["response"]
        assert answered["usage"]["input_tokens"] == count["input_tokens"] > max(20_000, read)
        read = count["input_tokens"]
        [item] = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert (item["type"], item["name"]) == ("function_call", "tool_7")
        assert json.loads(item["arguments"]) == ARGUMENTS
        # The client returns each item without the id that the server assigned.
        item = {name: item[name] for name in ("type", "name", "arguments", "call_id")}
        output = [{"type": "input_text", "text": "main.py\nutil.py"}]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": output}
        asked["input"] += [item, result]


def _said(role: str, text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": role,
        "content": [{"type": "input_text", "text": text}],
    }
