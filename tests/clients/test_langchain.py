"""langchain-openai, unmodified, against the real stack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.support.local_stack import Stack

CAPITAL = "What is the capital of France?"
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome"}
WEATHER = "What is the weather in Paris?"
METHODS: list[Literal["json_schema", "function_calling"]] = ["json_schema", "function_calling"]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    mood: Literal["happy", "sad"]


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return f'{{"temperature": {len(city) + 16}}}'


@tool
def get_time(city: Literal["Oslo", "Lima"]) -> str:
    """Get the time in a city"""
    return "12:00"


@pytest.fixture
async def options(stack: Stack) -> AsyncIterator[dict[str, Any]]:
    settings = {"model": "demo", "base_url": f"{stack.gateway}/v1", "api_key": "none"}
    # Own HTTP clients: langchain-openai's cached ones would outlive a test's event loop.
    with openai.DefaultHttpxClient() as client:
        async with openai.DefaultAsyncHttpxClient() as async_client:
            clients = {"http_client": client, "http_async_client": async_client}
            yield settings | clients | {"max_retries": 0}


@pytest.fixture
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(temperature=0, **options)


def _joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    return sum(rest, start=first)


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke([SystemMessage("You are helpful."), HumanMessage(CAPITAL)])
    assert "Paris" in answer.text
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "demo"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.usage_metadata["total_tokens"] == (
        answer.usage_metadata["input_tokens"] + answer.usage_metadata["output_tokens"]
    )


def test_stream_equals_invoke(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(temperature=0, stream_usage=True, logprobs=True, **options)
    whole = chat.invoke(CAPITAL)
    chunks = [chunk for chunk in chat.stream(CAPITAL) if isinstance(chunk, AIMessageChunk)]
    streamed = _joined(chunks)
    assert len(chunks) > 3
    assert streamed.text == whole.text
    assert streamed.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata is not None
    for key in ("finish_reason", "model_name", "system_fingerprint"):
        assert streamed.response_metadata[key] == whole.response_metadata[key]
    streamed_logprobs = streamed.response_metadata["logprobs"]["content"]
    assert streamed_logprobs == whole.response_metadata["logprobs"]["content"]


async def test_astream_without_usage(chat: ChatOpenAI) -> None:
    chunks = [chunk async for chunk in chat.astream(CAPITAL) if isinstance(chunk, AIMessageChunk)]
    assert "Paris" in _joined(chunks).text
    assert _joined(chunks).usage_metadata is None


async def test_batch(chat: ChatOpenAI) -> None:
    questions: list[Any] = [f"What is the capital of {country}?" for country in CAPITALS]
    for answers in (chat.batch(questions), await chat.abatch(questions)):
        for answer, capital in zip(answers, CAPITALS.values(), strict=True):
            assert capital in answer.text


def test_a_tool_is_called_and_its_answer_used(chat: ChatOpenAI) -> None:
    able = chat.bind_tools([get_weather])
    conversation: list[Any] = [HumanMessage(WEATHER)]
    call = able.invoke(conversation)
    assert isinstance(call, AIMessage)
    assert [(c["name"], c["args"]) for c in call.tool_calls] == [("get_weather", {"city": "Paris"})]
    assert call.response_metadata["finish_reason"] == "tool_calls"
    conversation += [call, get_weather.invoke(call.tool_calls[0])]
    answer = able.invoke(conversation)
    assert "21" in answer.text
    assert not answer.tool_calls


def test_the_same_through_responses(options: dict[str, Any]) -> None:
    chat = ChatOpenAI(temperature=0, use_responses_api=True, store=False, **options)
    able = chat.bind_tools([get_weather])
    chunks = [chunk for chunk in able.stream(WEATHER) if isinstance(chunk, AIMessageChunk)]
    call = able.invoke(WEATHER)
    assert isinstance(call, AIMessage)
    for said in (_joined(chunks), call):
        [told] = said.tool_calls
        assert (told["name"], told["args"]) == ("get_weather", {"city": "Paris"})
    answer = able.invoke([HumanMessage(WEATHER), call, get_weather.invoke(call.tool_calls[0])])
    assert "21" in answer.text
    structured = chat.with_structured_output(Person, method="json_schema")
    assert isinstance(structured.invoke(CAPITAL), Person)


def test_streamed_calls_equal_whole_ones(chat: ChatOpenAI) -> None:
    able = chat.bind_tools([get_weather])
    chunks = [chunk for chunk in able.stream(WEATHER) if isinstance(chunk, AIMessageChunk)]
    [streamed], [whole] = _joined(chunks).tool_calls, able.invoke(WEATHER).tool_calls
    assert streamed | {"id": whole["id"]} == whole


@pytest.mark.parametrize("choice", ["any", "get_time"])
def test_a_call_can_be_forced(chat: ChatOpenAI, choice: str) -> None:
    able = chat.bind_tools([get_time], tool_choice=choice, parallel_tool_calls=False)
    [call] = able.invoke(CAPITAL).tool_calls
    assert call["name"] == "get_time"
    assert call["args"]["city"] in {"Oslo", "Lima"}


# langchain-openai dumps openai's parsed messages, whose `parsed` has another type than declared.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("method", METHODS)
async def test_structured_output(
    options: dict[str, Any], method: Literal["json_schema", "function_calling"]
) -> None:
    chat = ChatOpenAI(temperature=1, seed=3, **options)
    able = chat.with_structured_output(Person, method=method)
    for person in (able.invoke(CAPITAL), await able.ainvoke(CAPITAL), *able.stream(CAPITAL)):
        assert isinstance(person, Person)


def test_structured_output_from_a_schema(chat: ChatOpenAI) -> None:
    able = chat.with_structured_output(
        Person.model_json_schema(), method="json_schema", include_raw=True
    )
    answer = able.invoke(CAPITAL)
    assert isinstance(answer, dict)
    assert answer["parsing_error"] is None
    assert set(answer["parsed"]) == {"name", "mood"}


@pytest.mark.parametrize("stream", [True, False])
def test_too_long_a_prompt_is_told_as_context_overflow(chat: ChatOpenAI, stream: bool) -> None:
    prompt = "Repeat: " + "tree " * 5000
    with pytest.raises(ContextOverflowError):
        list(chat.stream(prompt)) if stream else chat.invoke(prompt)


async def test_completions_of_several_prompts(options: dict[str, Any]) -> None:
    model = OpenAI(temperature=0, max_tokens=6, **options)
    prompts: list[Any] = [f"The capital of {country} is" for country in CAPITALS]
    whole = model.generate(prompts)
    assert len(whole.generations) == len(CAPITALS)
    assert whole.llm_output is not None
    assert whole.llm_output["token_usage"]["completion_tokens"] > 0
    for [generation], capital in zip(whole.generations, CAPITALS.values(), strict=True):
        assert capital in generation.text
    assert [g.text for [g] in whole.generations] == await model.abatch(prompts)
    assert "".join(model.stream(prompts[0])) == whole.generations[0][0].text
