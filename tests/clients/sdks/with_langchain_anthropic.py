"""LangChain's ChatAnthropic, unmodified."""

from __future__ import annotations

from typing import Any

from anthropic import APIStatusError
from checks import BASE_URL, CAPITAL, TOO_LONG, WEATHER, Person, forecast, refused, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

URL = BASE_URL.removesuffix("/v1")


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return forecast(city)


def model(name: str = "demo", **fields: Any) -> ChatAnthropic:
    return ChatAnthropic(
        model=name, base_url=URL, api_key="none", max_retries=0, max_tokens=100, **fields
    )


async def chat() -> None:
    answer = await model().ainvoke([SystemMessage("Be brief."), HumanMessage(CAPITAL)])
    assert "Paris" in answer.text
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["stop_reason"] == "end_turn"


async def stream() -> None:
    pieces = [piece async for piece in model().astream(CAPITAL)]
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == (await model().ainvoke(CAPITAL)).text


async def tools() -> None:
    able = model().bind_tools([get_weather])
    for ask in (able.ainvoke, _streamed(able)):
        called = await ask(WEATHER)
        [call] = called.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
        result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        answer = await ask([HumanMessage(WEATHER), called, result])
        assert "21" in answer.text


def _streamed(able: Any) -> Any:
    async def ask(said: Any) -> Any:
        whole = None
        async for piece in able.astream(said):
            whole = piece if whole is None else whole + piece
        return whole

    return ask


async def structured() -> None:
    able = model().with_structured_output(Person)
    assert isinstance(await able.ainvoke(CAPITAL), Person)


async def refusals() -> None:
    for name, prompt, status in (("nobody", CAPITAL, 404), ("demo", TOO_LONG, 400)):
        with refused(APIStatusError) as errors:
            await model(name).ainvoke(prompt)
        assert errors[0].status_code == status


if __name__ == "__main__":
    run(chat, stream, tools, structured, refusals)
