"""Pydantic AI, unmodified."""

from __future__ import annotations

from typing import Any

from checks import BASE_URL, CAPITAL, TOO_LONG, WEATHER, Person, forecast, refused, run
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key="none")


def agent(name: str = "demo", **fields: Any) -> Agent[None, Any]:
    model = OpenAIChatModel(name, provider=PROVIDER)
    return Agent(model, **{"model_settings": {"temperature": 0}} | fields)


async def chat() -> None:
    answer = await agent().run(CAPITAL)
    assert "Paris" in answer.output
    assert answer.usage.output_tokens > 0
    followed = await agent().run(CAPITAL, message_history=answer.all_messages())
    assert "Paris" in followed.output


async def stream() -> None:
    async with agent().run_stream(CAPITAL) as answer:
        deltas = [delta async for delta in answer.stream_text(delta=True, debounce_by=None)]
        assert answer.usage.output_tokens > 0
    assert len(deltas) > 1
    assert "".join(deltas) == (await agent().run(CAPITAL)).output


async def tools() -> None:
    able = agent()

    @able.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        return forecast(city)

    answer = await able.run(WEATHER)
    assert "21" in answer.output
    parts = [part for message in answer.all_messages() for part in message.parts]
    [call] = [part for part in parts if isinstance(part, ToolCallPart)]
    assert call.args_as_dict() == {"city": "Paris"}
    async with able.run_stream(WEATHER) as streamed:
        assert await streamed.get_output() == answer.output


async def structured() -> None:
    drawn = {"temperature": 1, "seed": 3}
    for form in (ToolOutput(Person), NativeOutput(Person)):
        able = agent(output_type=form, model_settings=drawn)
        assert isinstance((await able.run(CAPITAL)).output, Person)
        async with able.run_stream(CAPITAL) as streamed:
            assert isinstance(await streamed.get_output(), Person)


async def refusals() -> None:
    for model, prompt, status in (("nobody", CAPITAL, 404), ("demo", TOO_LONG, 400)):
        with refused(ModelHTTPError) as errors:
            await agent(model).run(prompt)
        assert errors[0].status_code == status


if __name__ == "__main__":
    run(chat, stream, tools, structured, refusals)
