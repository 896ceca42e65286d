"""Streamed and complete responses to the same request are equal, for all request options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
QUESTIONS = [
    "What is the capital of France?",
    "Count from 1 to 40",
    "Repeat: 你好，世界！😀🎉 こんにちは",
    "What is the weather in Paris?",
    "Hello!",
    "🦉",
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "猫", 7]}}}

requests = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["demo", "zh", "ja"]),
        "messages": st.sampled_from(QUESTIONS).map(lambda q: [{"role": "user", "content": q}]),
        "seed": st.integers(0, 1000),
        "max_tokens": st.sampled_from([1, 2, 10, 40]),
    },
    optional={
        "temperature": st.sampled_from([0, 0.7, 1, 2]),
        "top_p": st.sampled_from([0.1, 0.9]),
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(["1", ", ", "世", "a", " 3", "."]), max_size=2),
        "tools": st.just(TOOLS),
        "logprobs": st.just(True),
        "response_format": st.just(FORMAT),
        "presence_penalty": st.sampled_from([-1, 1.5]),
        "extra_body": st.fixed_dictionaries(
            {},
            optional={
                "top_k": st.integers(1, 5),
                "ignore_eos": st.booleans(),
                "include_stop_str_in_output": st.booleans(),
                "skip_special_tokens": st.booleans(),
                "min_tokens": st.sampled_from([0, 1]),
            },
        ),
    },
)


def _whole(client: openai.OpenAI, request: dict[str, Any]) -> tuple[list[Any], Any]:
    answer = client.chat.completions.create(**request)
    choices = []
    for choice in answer.choices:
        calls = [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or []
            if call.type == "function"
        ]
        logprobs = choice.logprobs.model_dump()["content"] if choice.logprobs else []
        choices.append((choice.message.content or "", calls, logprobs, choice.finish_reason))
    return choices, _usage(answer)


def _streamed(client: openai.OpenAI, request: dict[str, Any]) -> tuple[list[Any], Any]:
    count = request.get("n", 1)
    texts, finishes = [""] * count, [""] * count
    calls: list[list[list[str]]] = [[] for _ in range(count)]
    logprobs: list[list[Any]] = [[] for _ in range(count)]
    usage = None
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **request
    )
    for chunk in stream:
        usage = _usage(chunk) if chunk.usage else usage
        for choice in chunk.choices:
            at = choice.index
            texts[at] += choice.delta.content or ""
            finishes[at] += choice.finish_reason or ""
            if choice.logprobs:
                logprobs[at] += choice.logprobs.model_dump()["content"]
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    calls[at].append([call.function.name or "", ""])
                calls[at][call.index][1] += call.function.arguments or ""
    folded = [[(name, arguments) for name, arguments in own] for own in calls]
    return list(zip(texts, folded, logprobs, finishes, strict=True)), usage


def _usage(answer: Any) -> tuple[int, int]:
    """Return prompt and completion tokens. Cached tokens differ between runs and are left out."""
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(request=requests)
def test_streamed_equals_whole(client: openai.OpenAI, request: dict[str, Any]) -> None:
    assert _streamed(client, request) == _whole(client, request)


WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
TEMPLATE = "{% for m in messages %}{{ m.content }}<think></think>{% endfor %}"
Said = tuple[str, str, list[tuple[str, str]], str, int]
"""Reasoning, text, tool calls, finish reason (in a chat's words) and number of tokens."""


async def _chat(client: httpx.AsyncClient, *, stream: bool, tools: bool, limit: int) -> Said:
    body: dict[str, Any] = {"model": "m", "messages": [ASKED], "max_tokens": limit}
    if tools:
        body["tools"] = [
            {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
        ]
    if not stream:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        [choice], usage = answer["choices"], answer["usage"]
        pieces, finish = [choice["message"]], choice["finish_reason"]
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        told = (await client.post("/v1/chat/completions", json=body)).content
        *chunks, last, _ = list(SSEDecoder().iter_bytes(iter([told])))
        usage = last.json()["usage"]
        choices = [chunk.json()["choices"][0] for chunk in chunks]
        pieces, finish = [choice["delta"] for choice in choices], choices[-1]["finish_reason"]
    calls: list[tuple[str, str]] = []
    for call in [call for piece in pieces for call in piece.get("tool_calls", [])]:
        function = call["function"]
        if call.get("id"):
            calls.append((function["name"], ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + function["arguments"])
    thoughts = "".join(piece.get("reasoning_content") or "" for piece in pieces)
    text = "".join(piece.get("content") or "" for piece in pieces)
    return thoughts, text, calls, finish, usage["completion_tokens"]


async def _responses(client: httpx.AsyncClient, *, stream: bool, tools: bool, limit: int) -> Said:
    body: dict[str, Any] = {"model": "m", "input": [ASKED], "max_output_tokens": limit}
    if tools:
        body["tools"] = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
    told = await client.post("/v1/responses", json=body | {"stream": stream})
    if stream:
        events = [event.json() for event in SSEDecoder().iter_bytes(iter([told.content]))]
        answer, deltas = events[-1]["response"], dict[str, str]()
        for event in events:
            if "delta" in event:
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        texts = [deltas.get(item["id"], "") for item in answer["output"]]
    else:
        answer = told.json()
        texts = [_text(item) for item in answer["output"]]
    said = dict.fromkeys(("reasoning", "message"), "")
    calls = []
    for item, text in zip(answer["output"], texts, strict=True):
        if item["type"] == "function_call":
            calls.append((item["name"], text))
        else:
            said[item["type"]] += text
    finish = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
    tokens = answer["usage"]["output_tokens"]
    return said["reasoning"], said["message"], calls, finish, tokens


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])


async def _messages(client: httpx.AsyncClient, *, stream: bool, tools: bool, limit: int) -> Said:
    body: dict[str, Any] = {"model": "m", "messages": [ASKED], "max_tokens": limit}
    if tools:
        body["tools"] = [{"name": "get_weather", "input_schema": WEATHER}]
    told = await client.post("/v1/messages", json=body | {"stream": stream})
    if stream:
        blocks: list[dict[str, Any]] = []
        for event in [event.json() for event in SSEDecoder().iter_bytes(iter([told.content]))]:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"said": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                names = ("text", "thinking", "partial_json")
                blocks[-1]["said"] += "".join(delta.get(name, "") for name in names)
            elif event["type"] == "message_delta":
                stop, tokens = event["delta"]["stop_reason"], event["usage"]["output_tokens"]
    else:
        answer = told.json()
        stop, tokens = answer["stop_reason"], answer["usage"]["output_tokens"]
        blocks = [
            block | {"said": block.get("text", block.get("thinking", ""))}
            for block in answer["content"]
        ]
        for block in blocks:
            if block["type"] == "tool_use":
                block["said"] = json.dumps(block["input"])
    said = dict.fromkeys(("thinking", "text"), "")
    calls = []
    for block in blocks:
        if block["type"] == "tool_use":
            calls.append((block["name"], block["said"]))
        else:
            said[block["type"]] += block["said"]
    finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[stop]
    return said["thinking"], said["text"], calls, finish, tokens


async def _completions(client: httpx.AsyncClient, *, stream: bool, tools: bool, limit: int) -> Said:
    assert not tools
    body: dict[str, Any] = {"model": "m", "prompt": "Hi", "max_tokens": limit}
    if not stream:
        answer = (await client.post("/v1/completions", json=body)).json()
        [choice], usage = answer["choices"], answer["usage"]
        text, finish = choice["text"], choice["finish_reason"]
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        told = (await client.post("/v1/completions", json=body)).content
        *chunks, last, _ = list(SSEDecoder().iter_bytes(iter([told])))
        usage = last.json()["usage"]
        choices = [chunk.json()["choices"][0] for chunk in chunks]
        text = "".join(choice["text"] for choice in choices)
        finish = choices[-1]["finish_reason"]
    return "", text, [], finish, usage["completion_tokens"]


ASKED = {"role": "user", "content": "Hi"}
OUTPUTS = [
    *("你好，世界！😀", "<think>hm</think>", "<think>two\nand 🦉</think>\n\n4"),
    *(CALL + "\n" + CALL, "Let me see. " + CALL, "<think>call it</think>" + CALL),
    '<tool_call>{"name": "get_weather", "arguments": {"city": "猫🦉"}}</tool_call>',
]


async def test_all_protocols_say_the_same_streamed_and_whole(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    servicer = FakeTriton(tokens=[], fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tmp_path, endpoint, tool_form="hermes", max_seq_len=500) as (client, _, _),
    ):
        for output in OUTPUTS:
            ids = ids_of(tmp_path, output)
            tools = "<tool_call>" in output
            protocols = [_chat, _responses, _messages]
            if "<" not in output:
                protocols.append(_completions)
            for limit in (len(ids) // 2, len(ids) + 1):
                servicer.tokens = ids[:limit]
                first = await _chat(client, stream=False, tools=tools, limit=limit)
                assert first[4] == min(limit, len(ids))
                for ask in protocols:
                    for stream in (True, False):
                        found = await ask(client, stream=stream, tools=tools, limit=limit)
                        if ask is _messages and not stream:
                            # Arguments are JSON objects here, so a call that was cut has only its
                            # complete fields.
                            assert _names(found) == _names(first)
                        else:
                            assert found == first, (ask, stream, output, limit)
            assert (bool(first[0]), bool(first[2])) == ("<think>" in output, tools)


def _names(said: Said) -> tuple[Any, ...]:
    return (*said[:2], [name for name, _ in said[2]], *said[3:])
