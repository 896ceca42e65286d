"""LlamaIndex's OpenAILike, unchanged, against the gateway at GATEWAY_BASE_URL."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import openai
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

PROMPT = "The capital of France is"
CAPITAL = [ChatMessage(role=MessageRole.USER, content="What is the capital of France?")]
WEATHER = [ChatMessage(role=MessageRole.USER, content="What is the weather in Paris?")]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    mood: Literal["happy", "sad"]


class City(BaseModel):
    city: str


def get_weather(city: str) -> str:
    return f'{{"temperature": {len(city) + 16}}}'


TOOL = FunctionTool.from_defaults(
    get_weather, description="Get the weather in a city", fn_schema=City
)


def llm(**options: Any) -> OpenAILike:
    settings = {"model": "demo", "temperature": 0, "context_window": 2048, "max_retries": 0}
    settings |= {"api_base": os.environ["GATEWAY_BASE_URL"], "api_key": "none"}
    return OpenAILike(**settings | options)


async def complete() -> None:
    for is_chat_model in (True, False):
        model = llm(is_chat_model=is_chat_model, max_tokens=12)
        whole = model.complete(PROMPT)
        assert "Paris" in whole.text
        assert whole.additional_kwargs["completion_tokens"] > 0
        deltas = [part.delta for part in model.stream_complete(PROMPT)]
        assert len(deltas) > 1
        assert "".join(filter(None, deltas)) == whole.text
        assert (await model.acomplete(PROMPT)).text == whole.text
        async_deltas = [part.delta async for part in await model.astream_complete(PROMPT)]
        # How many tokens share a chunk goes with the moment.
        assert "".join(filter(None, async_deltas)) == whole.text


async def chat() -> None:
    for is_chat_model in (True, False):
        model = llm(is_chat_model=is_chat_model, max_tokens=12)
        whole = model.chat(CAPITAL)
        assert not is_chat_model or "Paris" in (whole.message.content or "")
        assert whole.message.role == MessageRole.ASSISTANT
        *_, last = model.stream_chat(CAPITAL)
        assert last.message.content == whole.message.content
        assert (await model.achat(CAPITAL)).message.content == whole.message.content
        parts = [part async for part in await model.astream_chat(CAPITAL)]
        assert parts[-1].message.content == whole.message.content


def tools() -> None:
    model = llm(is_chat_model=True, is_function_calling_model=True)

    def city(answer: ChatResponse) -> str:
        [call] = model.get_tool_calls_from_response(answer)
        assert call.tool_name == "get_weather"
        return str(call.tool_kwargs["city"])

    answer = model.chat_with_tools([TOOL], chat_history=WEATHER)
    *_, streamed = model.stream_chat_with_tools([TOOL], chat_history=WEATHER)
    assert city(answer) == city(streamed) == "Paris"
    for called in (answer, streamed):
        [call] = model.get_tool_calls_from_response(called)
        result = ChatMessage(
            role=MessageRole.TOOL,
            content=TOOL(**call.tool_kwargs).content,
            additional_kwargs={"tool_call_id": call.tool_id},
        )
        history = [*WEATHER, called.message, result]
        told = model.chat_with_tools([TOOL], chat_history=history)
        assert "21" in (told.message.content or "")


async def structured() -> None:
    question = PromptTemplate("What is the capital of France?")
    for by_call in (True, False):
        model = llm(
            is_chat_model=True,
            is_function_calling_model=by_call,
            should_use_structured_outputs=not by_call,
        )
        assert isinstance(model.structured_predict(Person, question), Person)
        assert isinstance(await model.astructured_predict(Person, question), Person)


def errors() -> None:
    prompt = "tree " * 5000
    for is_chat_model in (True, False):
        model = llm(is_chat_model=is_chat_model)
        for ask in (model.complete, model.stream_complete):
            error = _refusal(ask, prompt)
            assert error.code == "context_length_exceeded"
            assert error.request_id


def _refusal(ask: Callable[[str], Any], prompt: str) -> openai.BadRequestError:
    try:
        list(ask(prompt))
    except openai.BadRequestError as error:
        return error
    raise AssertionError("a prompt that is too long was answered")


async def main(checks: list[Callable[[], Any]]) -> int:
    failed = 0
    for check in checks:
        started = time.monotonic()
        try:
            if inspect.isawaitable(running := check()):
                await running
        except Exception:
            failed += 1
            print(f"not ok {check.__name__}\n{traceback.format_exc()}")
        else:
            print(f"ok {check.__name__} ({time.monotonic() - started:.2f} s)")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(asyncio.run(main([complete, chat, tools, structured, errors])))
