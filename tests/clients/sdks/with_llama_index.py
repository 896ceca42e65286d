"""LlamaIndex's OpenAILike, unmodified."""

from __future__ import annotations

from typing import Any

import openai
from checks import BASE_URL, CAPITAL, TOO_LONG, WEATHER, Person, forecast, refused, run
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

PROMPT = "The capital of France is"


class City(BaseModel):
    city: str


TOOL = FunctionTool.from_defaults(
    forecast, name="get_weather", description="Get the weather in a city", fn_schema=City
)


def llm(**options: Any) -> OpenAILike:
    settings = {"model": "demo", "temperature": 0, "context_window": 2048, "max_retries": 0}
    settings |= {"api_base": BASE_URL, "api_key": "none"}
    return OpenAILike(**settings | options)


def _said(text: str) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=text)]


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
        # The number of tokens per chunk depends on timing, so only the text is compared.
        assert "".join(filter(None, async_deltas)) == whole.text


async def chat() -> None:
    for is_chat_model in (True, False):
        model = llm(is_chat_model=is_chat_model, max_tokens=12)
        whole = model.chat(_said(CAPITAL))
        assert not is_chat_model or "Paris" in (whole.message.content or "")
        assert whole.message.role == MessageRole.ASSISTANT
        *_, last = model.stream_chat(_said(CAPITAL))
        assert last.message.content == whole.message.content
        assert (await model.achat(_said(CAPITAL))).message.content == whole.message.content
        parts = [part async for part in await model.astream_chat(_said(CAPITAL))]
        assert parts[-1].message.content == whole.message.content


def tools() -> None:
    model = llm(is_chat_model=True, is_function_calling_model=True)
    asked = _said(WEATHER)

    def city(answer: ChatResponse) -> str:
        [call] = model.get_tool_calls_from_response(answer)
        assert call.tool_name == "get_weather"
        return str(call.tool_kwargs["city"])

    answer = model.chat_with_tools([TOOL], chat_history=asked)
    *_, streamed = model.stream_chat_with_tools([TOOL], chat_history=asked)
    assert city(answer) == city(streamed) == "Paris"
    for called in (answer, streamed):
        [call] = model.get_tool_calls_from_response(called)
        result = ChatMessage(
            role=MessageRole.TOOL,
            content=TOOL(**call.tool_kwargs).content,
            additional_kwargs={"tool_call_id": call.tool_id},
        )
        history = [*asked, called.message, result]
        told = model.chat_with_tools([TOOL], chat_history=history)
        assert "21" in (told.message.content or "")


async def structured() -> None:
    question = PromptTemplate(CAPITAL)
    for by_call in (True, False):
        model = llm(
            is_chat_model=True,
            is_function_calling_model=by_call,
            should_use_structured_outputs=not by_call,
        )
        assert isinstance(model.structured_predict(Person, question), Person)
        assert isinstance(await model.astructured_predict(Person, question), Person)


def refusals() -> None:
    for is_chat_model in (True, False):
        model = llm(is_chat_model=is_chat_model)
        for ask in (model.complete, model.stream_complete):
            with refused(openai.BadRequestError) as errors:
                list(ask(TOO_LONG))
            assert errors[0].code == "context_length_exceeded"
            assert errors[0].request_id


if __name__ == "__main__":
    run(complete, chat, tools, structured, refusals)
