"""The openai package's own features: parsing, stream events, raw responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ParsedChatCompletion
from pydantic import BaseModel, Field

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
UNKNOWN: dict[str, Any] = {"model": "nobody", "messages": CAPITAL}
SEEDS = range(5)


class Person(BaseModel):
    """A form that the demo model never writes of its own accord."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    mood: Literal["happy", "sad"]
    friends: list[Literal["Ada", "Bo"]] = Field(max_length=2)


class get_weather(BaseModel):
    """Get the weather in a city"""

    city: str


class get_time(BaseModel):
    """Get the time in a city"""

    city: Literal["Oslo", "Lima"]


TOOLS: list[Any] = [openai.pydantic_function_tool(get_weather)]
FORCED: dict[str, Any] = {
    "tools": [openai.pydantic_function_tool(get_time)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def _drawn(seed: int) -> dict[str, Any]:
    """Return a request to which the unguided model answers with a sentence, for each of `SEEDS`."""
    return {"model": "demo", "messages": CAPITAL, "temperature": 1, "seed": seed}


def _person(answer: ParsedChatCompletion[Person]) -> Person:
    assert answer.choices[0].finish_reason == "stop"
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    return parsed


def _text(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


@pytest.mark.llmapi_refuses
def test_parse_gives_the_model_asked_for(client: openai.OpenAI) -> None:
    people = [
        _person(client.chat.completions.parse(response_format=Person, **_drawn(seed)))
        for seed in SEEDS
    ]
    assert len({person.model_dump_json() for person in people}) > 1


@pytest.mark.llmapi_refuses
async def test_parse_and_stream_agree(async_client: openai.AsyncOpenAI) -> None:
    completions = async_client.chat.completions
    for seed in SEEDS[:2]:
        whole = await completions.parse(response_format=Person, **_drawn(seed))
        async with completions.stream(response_format=Person, **_drawn(seed)) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        assert _person(final) == _person(whole)
        [done] = [event for event in events if event.type == "content.done"]
        assert done.parsed == _person(whole)


@pytest.mark.llmapi_refuses
def test_parse_of_an_answer_cut_by_length_raises(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        client.chat.completions.parse(response_format=Person, max_tokens=3, **_drawn(0))
    assert caught.value.completion.usage is not None
    assert caught.value.completion.usage.completion_tokens == 3


def test_parse_gives_the_arguments_of_a_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(messages=WEATHER, tools=TOOLS, **GREEDY)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == get_weather(city="Paris")


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("dumped", [True, False])
def test_messages_can_be_handed_back_as_they_came(
    client: openai.OpenAI, streamed: bool, dumped: bool
) -> None:
    """Check that the package's objects and their dumps can be sent back.

    Applications append either to the conversation.
    """
    message: ChatCompletionMessage
    if streamed:
        with client.chat.completions.stream(messages=WEATHER, tools=TOOLS, **GREEDY) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        answer = client.chat.completions.create(messages=WEATHER, tools=TOOLS, **GREEDY)
        message = answer.choices[0].message
    [call] = message.tool_calls or []
    conversation = [
        *WEATHER,
        message.model_dump() if dumped else message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'},
    ]
    last = client.chat.completions.create(messages=conversation, tools=TOOLS, **GREEDY)
    assert "21" in _text(last)
    assert not last.choices[0].message.tool_calls


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_events_of_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=CAPITAL, logprobs=True, **GREEDY)
    with client.chat.completions.stream(messages=CAPITAL, logprobs=True, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == _text(whole) == _text(final)
    assert [event.content for event in events if event.type == "content.done"] == [_text(whole)]
    [logprobs] = [event.content for event in events if event.type == "logprobs.content.done"]
    assert whole.choices[0].logprobs is not None
    assert logprobs == whole.choices[0].logprobs.content
    assert final.choices[0].finish_reason == "stop"


async def test_events_of_a_call(async_client: openai.AsyncOpenAI) -> None:
    deltas: list[Any] = []
    async with asyncio.timeout(300):
        while len(deltas) <= 1:  # one delta has all tokens if the gateway got no CPU time
            async with async_client.chat.completions.stream(
                messages=WEATHER, tools=TOOLS, stream_options={"include_usage": True}, **GREEDY
            ) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_completion()
            deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    [done] = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert "".join(e.arguments_delta for e in deltas) == done.arguments
    assert done.parsed_arguments == get_weather(city="Paris")
    assert done.name == "get_weather"
    assert not any(e.delta for e in events if e.type == "content.delta")
    assert final.choices[0].finish_reason == "tool_calls"
    whole = await async_client.chat.completions.create(messages=WEATHER, tools=TOOLS, **GREEDY)
    assert final.usage == whole.usage


@pytest.mark.llmapi_refuses
async def test_events_of_a_forced_call(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.parse(**FORCED, **_drawn(1))
    async with async_client.chat.completions.stream(**FORCED, **_drawn(1)) as stream:
        final = await stream.get_final_completion()
    for answer in (whole, final):
        [call] = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, get_time)


def test_request_ids(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(messages=CAPITAL, **GREEDY)
    assert raw.status_code == 200
    assert raw.request_id
    assert raw.parse()._request_id == raw.request_id == raw.headers["x-request-id"]
    own = {"x-request-id": "trace-7"}
    answer = client.chat.completions.create(messages=CAPITAL, extra_headers=own, **GREEDY)
    assert answer._request_id == "trace-7"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(extra_headers=own, **UNKNOWN)
    assert caught.value.request_id == "trace-7"


async def test_raw_streams(async_client: openai.AsyncOpenAI) -> None:
    raw = await async_client.chat.completions.with_raw_response.create(
        messages=CAPITAL, stream=True, **GREEDY
    )
    assert raw.request_id
    chunks = [chunk async for chunk in raw.parse()]
    async with async_client.chat.completions.with_streaming_response.create(
        messages=CAPITAL, stream=True, **GREEDY
    ) as response:
        lines = [line async for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines)
    again = [json.loads(line.removeprefix("data: ")) for line in lines]
    # The number of tokens per chunk depends on timing, so only the text is compared.
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in again]
    assert "".join(texts) == "".join([c.choices[0].delta.content or "" for c in chunks])


async def test_many_requests_on_one_client(async_client: openai.AsyncOpenAI) -> None:
    capitals = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid"}

    async def ask(country: str) -> str:
        question: Any = [{"role": "user", "content": f"What is the capital of {country}?"}]
        return _text(await async_client.chat.completions.create(messages=question, **GREEDY))

    answers = await asyncio.gather(*map(ask, capitals))
    for answer, capital in zip(answers, capitals.values(), strict=True):
        assert capital in answer


@pytest.mark.parametrize("stream", [True, False])
async def test_errors_are_of_the_right_class(
    async_client: openai.AsyncOpenAI, stream: bool
) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await async_client.chat.completions.create(stream=stream, **UNKNOWN)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    long: list[Any] = [{"role": "user", "content": "Repeat: " + "tree " * 5000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        await async_client.chat.completions.create(messages=long, stream=stream, **GREEDY)
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.request_id
