"""Streamed and whole answers to the same request are the same, whatever is asked for."""

from __future__ import annotations

from typing import Any

import openai
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    """Cached tokens differ between a first and a second run by their nature."""
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(request=requests)
def test_streamed_equals_whole(client: openai.OpenAI, request: dict[str, Any]) -> None:
    assert _streamed(client, request) == _whole(client, request)
