"""Models that write their reasoning in tags: `reasoning_content` is separate from the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.patience import PATIENCE_S

OUTPUT = "<think>two and two</think>4"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}\n{% endfor %}assistant:"
    "{% if effort_shown is defined %}[{{ reasoning_effort }}]{% endif %}"
)


@pytest.fixture
def thinking(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("stream", [True, False])
async def test_thoughts_are_apart(thinking: Path, stream: bool) -> None:
    servicer = FakeTriton(tokens=ids_of(thinking, OUTPUT), fault=None, step=0)
    async with serving(servicer) as endpoint, running(thinking, endpoint) as (client, _, _):
        api = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x", timeout=PATIENCE_S)
        messages: list[Any] = [
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": "4", "reasoning_content": "easy"},
            {"role": "user", "content": "again"},
        ]
        async with api:
            answer: Any = await api.chat.completions.create(
                model="m", messages=messages, stream=stream, reasoning_effort="low"
            )
            if stream:
                deltas = [chunk.choices[0].delta async for chunk in answer]
                thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
                content = "".join(d.content or "" for d in deltas)
            else:
                message = answer.choices[0].message
                thought, content = message.reasoning_content, message.content
    assert (thought, content) == ("two and two", "4")
    [request] = servicer.requests
    assert request.raw_input_contents, "the history went to the engine"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("written", "stop", "told"),
    [
        ("<think>two and two</think>4 and no more", "and", ("two and two", "4 ", "stop")),
        ("<think>two and two</think>4", "two", ("two and two", "4", "length")),
        ("<think>two and two</think>4", "k>4", ("two and two", "4", "length")),
        ("4 and no more", "and", ("", "4 ", "stop")),
    ],
)
async def test_stop_strings_are_looked_for_in_content(
    thinking: Path, written: str, stop: str, told: tuple[str, str, str], stream: bool
) -> None:
    tokens = ids_of(thinking, written)
    servicer = FakeTriton(tokens=tokens, fault=None, step=0)
    async with serving(servicer) as endpoint, running(thinking, endpoint) as (client, _, _):
        api = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x", timeout=PATIENCE_S)
        async with api:
            answer: Any = await api.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "2+2"}],
                stream=stream,
                stop=[stop],
                max_tokens=len(tokens),
            )
            choices = [c.choices[0] async for c in answer] if stream else answer.choices
    messages = [choice.delta if stream else choice.message for choice in choices]
    thought = "".join(getattr(each, "reasoning_content", None) or "" for each in messages)
    content = "".join(each.content or "" for each in messages)
    assert (thought, content, choices[-1].finish_reason) == told
    [request] = servicer.requests
    assert "stop_words_list" not in {tensor.name for tensor in request.inputs}


async def test_a_guided_answer_is_content_whatever_the_template_opens(thinking: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(thinking, '{"a":1}'), fault=None, step=0)
    config = {"eos_token": "!", "chat_template": TEMPLATE + "<think>"}
    (thinking / "tokenizer_config.json").write_text(json.dumps(config))
    async with serving(servicer) as endpoint, running(thinking, endpoint) as (client, _, _):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "2+2"}],
            "response_format": {"type": "json_object"},
        }
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == '{"a":1}'
    assert "reasoning_content" not in answer["choices"][0]["message"]


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ({}, "as it likes"),
        ({"reasoning_effort": "low"}, "as it likes"),
        ({"reasoning_effort": "none"}, "no"),
        ({"reasoning": {"effort": "none"}}, "no"),
        ({"reasoning": {"effort": "none", "enabled": True}}, "yes"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "yes"),
        ({"input": "2+2", "reasoning": {"effort": "none"}}, "no"),
        (
            {
                "input": "2+2",
                "reasoning": {"effort": "none"},
                "chat_template_kwargs": {"enable_thinking": True},
            },
            "yes",
        ),
    ],
)
async def test_no_effort_is_no_thinking(
    thinking: Path, asked: dict[str, Any], written: str
) -> None:
    """Check that "none" sets `enable_thinking` to false, as few templates know efforts."""
    template = (
        "{% if enable_thinking is not defined %}as it likes"
        "{% else %}{{ 'yes' if enable_thinking else 'no' }}{% endif %}"
    )
    config = {"eos_token": "!", "chat_template": template}
    (thinking / "tokenizer_config.json").write_text(json.dumps(config))
    servicer = FakeTriton(tokens=ids_of(thinking, "4"), fault=None, step=0)
    said = [{"role": "user", "content": "2+2"}]
    path = "/v1/responses" if "input" in asked else "/v1/chat/completions"
    own = asked if "input" in asked else asked | {"messages": said}
    async with serving(servicer) as endpoint, running(thinking, endpoint) as (client, _, _):
        answer = (await client.post(path, json=own | {"model": "m"})).json()
    usage = answer["usage"]
    # In this tokenizer, each character is one token.
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(written)
