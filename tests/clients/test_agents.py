"""openai-agents, unmodified, against the real stack: its default is the Responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from agents import OpenAIResponsesModel

WEATHER = "What is the weather in Paris?"


@pytest.fixture
async def model(stack: Stack) -> AsyncIterator[OpenAIResponsesModel]:
    from agents import OpenAIResponsesModel, set_tracing_disabled

    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(
        base_url=f"{stack.gateway}/v1", api_key="none", timeout=PATIENCE_S
    ) as client:
        yield OpenAIResponsesModel(model="demo", openai_client=client)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_calls_its_function(model: OpenAIResponsesModel, stream: bool) -> None:
    from agents import Agent, ModelSettings, RunConfig, Runner, function_tool

    cities: list[str] = []

    @function_tool(strict_mode=False)
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        cities.append(city)
        return '{"temperature": 21}'

    agent: Agent[Any] = Agent(
        name="forecaster",
        model=model,
        model_settings=ModelSettings(temperature=0, max_tokens=60, store=False),
        tools=[get_weather],
    )
    config = RunConfig(tracing_disabled=True)
    if stream:
        running = Runner.run_streamed(agent, WEATHER, run_config=config)
        kinds = [
            event.data.type
            async for event in running.stream_events()
            if event.type == "raw_response_event"
        ]
        assert kinds.count("response.completed") == 2
        result: Any = running
    else:
        result = await Runner.run(agent, WEATHER, run_config=config)
    assert cities == ["Paris"]
    assert "21" in result.final_output
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


async def test_an_agent_is_told_what_is_wrong(model: OpenAIResponsesModel) -> None:
    from agents import Agent, ModelSettings, RunConfig, Runner

    config = RunConfig(tracing_disabled=True)
    settings = ModelSettings(temperature=3, store=False)
    agent: Agent[Any] = Agent(name="loud", model=model, model_settings=settings)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await Runner.run(agent, WEATHER, run_config=config)
