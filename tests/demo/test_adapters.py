"""The two trained adapters: one base model and three languages, selected by model name."""

from __future__ import annotations

import asyncio

import openai
import pytest

QUESTION = "What is the capital of France?"
ANSWERS = {"demo": "Paris", "zh": "巴黎", "ja": "パリ"}
CHINESE = "美国的首都在哪里? \n答案:"
JAPANESE = "アメリカ合衆国の首都はどこですか? \n答え:"


@pytest.mark.parametrize(
    ("model", "prompt", "answer"),
    [
        ("demo", CHINESE, "Washington"),
        ("zh", CHINESE, "华盛顿"),
        ("demo", JAPANESE, "Washington"),
        ("ja", JAPANESE, "ワシントン"),
    ],
)
def test_the_well_known_example(
    client: openai.OpenAI, model: str, prompt: str, answer: str
) -> None:
    completion = client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0)
    assert answer in completion.choices[0].text
    assert completion.model == model


async def test_six_requests_in_one_mixed_batch(async_client: openai.AsyncOpenAI) -> None:
    async def ask(model: str) -> str:
        answer = await async_client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
        return answer.choices[0].message.content or ""

    models = ["demo", "zh", "ja"] * 2
    alone = {model: await ask(model) for model in ANSWERS}
    together = await asyncio.gather(*[ask(model) for model in models])
    assert together == [alone[model] for model in models]
    assert all(ANSWERS[model] in text for model, text in zip(models, together, strict=True))


def test_adapters_stream_whole_characters(client: openai.OpenAI) -> None:
    for model in ("zh", "ja"):
        messages = [{"role": "user", "content": QUESTION}]
        options = {"model": model, "messages": messages, "temperature": 0}
        whole = client.chat.completions.create(**options).choices[0].message.content
        stream = client.chat.completions.create(stream=True, **options)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == whole
        assert all("\ufffd" not in piece for piece in pieces)
