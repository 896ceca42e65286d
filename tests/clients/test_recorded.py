"""Recorded requests of real programs (`python -m tests.programs --record`), each answered again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai._streaming import SSEDecoder

from tests.programs.engine.script import Call, Script
from tests.programs.engine.stack import scripted_stack

REQUESTS = Path(__file__).parents[1] / "data" / "requests"
NAMES = [str(path.relative_to(REQUESTS)) for path in sorted(REQUESTS.rglob("*.json"))]
# The first prompt that offers tools gets a call of the first tool. Others get text.
SCRIPT = Script(calls=[Call(".*", {})])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with scripted_stack(tmp_path_factory.mktemp("recorded")) as stack:
        stack.use(SCRIPT)
        with stack.gateway.client() as client:
            yield client


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_request_is_answered(client: httpx.Client, name: str) -> None:
    recorded = json.loads((REQUESTS / name).read_text(encoding="utf-8"))
    method, path, body = recorded["method"], recorded["path"], recorded.get("body")
    content = None if body is None else json.dumps(body)
    answer = client.request(method, path, headers=recorded["headers"], content=content)
    assert answer.status_code == recorded["status"], answer.text
    if body is None:
        return
    assert answer.status_code == 200
    endpoint = path.partition("?")[0]
    if body.get("stream"):
        events = [event.json() for event in _events(answer)]
        calls, usage = STREAMED[endpoint](body, events)
        assert answer.headers["content-type"].startswith("text/event-stream")
    else:
        calls, usage = COMPLETE[endpoint](answer.json())
    has_option = body.get("stream") and endpoint in (CHAT, COMPLETIONS)
    assert bool(usage) is (not has_option or _asks_usage(body))
    assert calls == (bool(body.get("tools")) and not _has_result(body))


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def _events(answer: httpx.Response) -> Iterator[Any]:
    for event in SSEDecoder().iter_bytes(iter([answer.content])):
        if event.data == "[DONE]":
            return
        yield event


def _asks_usage(body: dict[str, Any]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


def _has_result(body: dict[str, Any]) -> bool:
    """Return True if a tool's result is in the conversation."""
    text = json.dumps(body.get("messages", body.get("input")))
    return any(f'"{kind}"' in text for kind in ("tool", "tool_result", "function_call_output"))


def _chat_stream(body: dict[str, Any], chunks: list[dict[str, Any]]) -> tuple[bool, Any]:
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    calls = any(choice["delta"].get("tool_calls") for choice in choices)
    assert choices[-1]["finish_reason"] == ("tool_calls" if calls else _text_end(body))
    return calls, chunks[-1].get("usage")


def _text_end(body: dict[str, Any]) -> str:
    """Return the finish reason of an answer without calls. Load testers request a fixed length."""
    return "length" if body.get("ignore_eos") else "stop"


def _completion_stream(body: dict[str, Any], chunks: list[dict[str, Any]]) -> tuple[bool, Any]:
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == [_text_end(body)]
    return False, chunks[-1].get("usage")


def _messages_stream(body: dict[str, Any], events: list[dict[str, Any]]) -> tuple[bool, Any]:
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    calls = any(block["type"] == "tool_use" for block in blocks)
    [delta] = [event for event in events if event["type"] == "message_delta"]
    assert delta["delta"]["stop_reason"] == ("tool_use" if calls else "end_turn")
    return calls, delta["usage"]


def _responses_stream(body: dict[str, Any], events: list[dict[str, Any]]) -> tuple[bool, Any]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ends = {"stop": "response.completed", "length": "response.incomplete"}
    assert events[-1]["type"] == ends[_text_end(body)]
    return _response(events[-1]["response"])


def _chat(answer: dict[str, Any]) -> tuple[bool, Any]:
    return bool(answer["choices"][0]["message"].get("tool_calls")), answer["usage"]


def _message(answer: dict[str, Any]) -> tuple[bool, Any]:
    return any(block["type"] == "tool_use" for block in answer["content"]), answer["usage"]


def _response(answer: dict[str, Any]) -> tuple[bool, Any]:
    kinds = [item["type"] for item in answer["output"]]
    return "function_call" in kinds, answer["usage"]


STREAMED = {
    CHAT: _chat_stream,
    COMPLETIONS: _completion_stream,
    "/v1/messages": _messages_stream,
    "/v1/responses": _responses_stream,
}
COMPLETE = {
    CHAT: _chat,
    COMPLETIONS: lambda answer: (False, answer["usage"]),
    "/v1/messages": _message,
    "/v1/messages/count_tokens": lambda answer: (False, answer["input_tokens"]),
    "/v1/responses": _response,
}


PRIVATE = {
    "a path of the machine": r"/tmp/|/root/|/work/|build/programs|site-packages",
    "a random id": r"[0-9a-f]{8}-(?!0000-)[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "a hash": r"(?<![0-9a-f])(?!0{26})[0-9a-f]{32,}",
    "a credential": r"(?i)bearer \w+|\"(?:authorization|x-api-key|cookie)\"",
    "an address": r"[\w.]+@(?!ai-sdk)[\w-]+\.(?:com|org|net|io)\b",
}
MAX_BYTES = 1_500_000


def test_nothing_private_is_stored() -> None:
    texts = {name: (REQUESTS / name).read_text(encoding="utf-8") for name in NAMES}
    found = {
        (name, kind, match[0])
        for name, text in texts.items()
        for kind, pattern in PRIVATE.items()
        for match in re.finditer(pattern, text)
    }
    assert not found
    assert sum(map(len, texts.values())) < MAX_BYTES
