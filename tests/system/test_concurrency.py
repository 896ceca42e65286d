"""Many concurrent requests in one in-flight batch: no answer has tokens of another request."""

from __future__ import annotations

import asyncio
import random

import openai
import pytest

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Count from 1 to 20",
    "Count from 5 to 60",
    "Repeat: 你好，世界！😀🎉 こんにちは",
    "Repeat: the quick brown fox",
    "What is 3 + 4?",
    "Hello!",
    "Count from 1 to 150",
    "What is the capital of Peru?",
]


@pytest.mark.slow
async def test_fifty_streams_equal_their_twins(async_client: openai.AsyncOpenAI) -> None:
    rng = random.Random(5)
    jobs = [(rng.choice(QUESTIONS), rng.choice([3, 17, 64, 400])) for _ in range(50)]

    async def streamed(question: str, limit: int) -> tuple[str, str | None, int]:
        text, finish, tokens = "", None, 0
        async for chunk in await async_client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            max_tokens=limit,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        return text, finish, tokens

    async def whole(question: str, limit: int) -> tuple[str, str | None, int]:
        answer = await async_client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            max_tokens=limit,
            temperature=0,
        )
        assert answer.usage is not None
        [choice] = answer.choices
        return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens

    together = await asyncio.gather(*[streamed(*job) for job in jobs])
    alone = {job: await whole(*job) for job in dict.fromkeys(jobs)}
    assert together == [alone[job] for job in jobs]
