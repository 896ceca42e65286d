"""OpenAI's Agents SDK, unmodified, over chat completions."""

from __future__ import annotations

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE_URL, CAPITAL, TOO_LONG, WEATHER, Person, forecast, refused, run
from openai.types.responses import ResponseTextDeltaEvent

CLIENT = openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
GREEDY = ModelSettings(temperature=0)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return forecast(city)


def agent(name: str = "demo", **fields: object) -> Agent:
    model = OpenAIChatCompletionsModel(model=name, openai_client=CLIENT)
    return Agent(name="A", model=model, **{"model_settings": GREEDY} | fields)


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def chat() -> None:
    answer = await Runner.run(agent(), CAPITAL)
    assert "Paris" in answer.final_output
    assert answer.context_wrapper.usage.output_tokens > 0
    followed = await Runner.run(agent(), [*answer.to_input_list(), *_said(CAPITAL)])
    assert "Paris" in followed.final_output


async def stream() -> None:
    counted = ModelSettings(temperature=0, include_usage=True)
    answer = Runner.run_streamed(agent(model_settings=counted), CAPITAL)
    deltas = [
        event.data.delta
        async for event in answer.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    assert len(deltas) > 1
    whole = await Runner.run(agent(), CAPITAL)
    assert "".join(deltas) == answer.final_output == whole.final_output
    assert answer.context_wrapper.usage.output_tokens > 0


async def tools() -> None:
    able = agent(tools=[get_weather])
    answer = await Runner.run(able, WEATHER)
    assert "21" in answer.final_output
    streamed = Runner.run_streamed(able, WEATHER)
    called = [
        event.item.raw_item.name
        async for event in streamed.stream_events()
        if event.type == "run_item_stream_event" and event.name == "tool_called"
    ]
    assert called == ["get_weather"]
    assert streamed.final_output == answer.final_output
    # The next turn returns all items of the first one.
    again = await Runner.run(able, [*answer.to_input_list(), *_said(WEATHER)])
    assert again.final_output


async def forced() -> None:
    once = ModelSettings(temperature=0, tool_choice="get_weather", parallel_tool_calls=False)
    able = agent(tools=[get_weather], model_settings=once, tool_use_behavior="stop_on_first_tool")
    assert "temperature" in (await Runner.run(able, WEATHER)).final_output


async def structured() -> None:
    drawn = ModelSettings(temperature=1, extra_args={"seed": 3})
    answer = await Runner.run(agent(output_type=Person, model_settings=drawn), CAPITAL)
    assert isinstance(answer.final_output, Person)


async def structured_with_tools() -> None:
    """Check that the model may call a tool even if its answer must be a `Person`."""
    once = {"tools": [get_weather], "tool_use_behavior": "stop_on_first_tool"}
    found = await Runner.run(agent(output_type=Person, **once), WEATHER)
    assert found.new_items[0].raw_item.name == "get_weather"


async def refusals() -> None:
    for model, prompt, code in (
        ("nobody", CAPITAL, "model_not_found"),
        ("demo", TOO_LONG, "context_length_exceeded"),
    ):
        with refused(openai.APIStatusError) as errors:
            await Runner.run(agent(model), prompt)
        assert errors[0].code == code


if __name__ == "__main__":
    set_tracing_disabled(True)
    run(chat, stream, tools, forced, structured, structured_with_tools, refusals)
