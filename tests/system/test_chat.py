"""Chat completions: the real openai package against the real stack."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from tokenizers import Tokenizer

from ops.commands.up import DEMO_MODEL
from tests.support.patience import PATIENCE_S

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
UNHEARD_OF = "🦉"
SCRIPTS = [
    "你好，世界！",
    "こんにちは、世界。",
    "😀🎉🦉 owls",
    "Grüße aus Köln",
]


def _chunks(client: openai.OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    options = {"model": "demo", "messages": CAPITAL, "temperature": 0} | fields
    return list(client.chat.completions.create(stream=True, **options))


def _text(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_a_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=CAPITAL, temperature=0)
    [choice] = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "demo"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens > 0


def test_streamed_chunks_have_openais_form(client: openai.OpenAI) -> None:
    chunks = _chunks(client)
    assert {(c.id, c.created, c.model, c.object) for c in chunks} == {
        (chunks[0].id, chunks[0].created, "demo", "chat.completion.chunk")
    }
    first, *middle, last = [c.choices[0] for c in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert all(c.delta.role is None and c.delta.content and not c.finish_reason for c in middle)
    assert (last.delta.content, last.finish_reason) == (None, "stop")
    assert all(c.usage is None for c in chunks)
    assert "Paris" in _text(chunks)


def test_the_raw_stream_is_what_proxies_and_parsers_expect(client: openai.OpenAI) -> None:
    body = {"model": "demo", "messages": CAPITAL, "stream": True, "max_tokens": 3}
    with httpx.stream(
        "POST", f"{client.base_url}chat/completions", json=body, timeout=PATIENCE_S
    ) as response:
        text = response.read().decode()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


def test_usage_comes_in_a_last_chunk_only_when_asked_for(client: openai.OpenAI) -> None:
    chunks = _chunks(client, stream_options={"include_usage": True})
    twin = client.chat.completions.create(model="demo", messages=CAPITAL, temperature=0)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == twin.usage
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.token_mode_only("the ensemble decodes each token alone", of=["ensemble"])
@pytest.mark.parametrize("text", SCRIPTS)
def test_no_character_is_ever_broken(client: openai.OpenAI, text: str) -> None:
    messages = [{"role": "user", "content": f"Repeat: {text}"}]
    chunks = _chunks(client, messages=messages)
    twin = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert _text(chunks) == twin.choices[0].message.content == text
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks)


@pytest.mark.token_mode_only("the ensemble decodes each token alone", of=["ensemble"])
@pytest.mark.parametrize("seed", range(8))
def test_wild_sampling_never_shows_a_replacement_character(
    client: openai.OpenAI, seed: int
) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Repeat: 🦉🦊鸟"}],
        "temperature": 2,
        "seed": seed,
        "max_tokens": 60,
    }
    twin = client.chat.completions.create(**options).choices[0].message.content
    assert "\ufffd" not in (twin or "")
    assert _text(_chunks(client, **options)) == twin


@pytest.mark.slow
def test_counting_goes_on_for_hundreds_of_tokens(client: openai.OpenAI) -> None:
    # A text model with accumulated tokens decodes all earlier tokens again for each new token.
    messages = [{"role": "user", "content": "Count from 1 to 200"}]
    chunks = _chunks(client, messages=messages, stream_options={"include_usage": True})
    numbers = [int(n) for n in _text(chunks).replace(".", "").split(",")]
    assert numbers == list(range(1, 201))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 300


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CAPITAL, max_completion_tokens=2, temperature=0
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("stop", ["7, 8", ["zzz", ", 8,"], "8"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, stop: str | list[str], stream: bool
) -> None:
    messages = [{"role": "user", "content": "Count from 1 to 300"}]
    options: dict[str, Any] = {"messages": messages, "stop": stop}
    if stream:
        chunks = _chunks(client, **options)
        text, finish = _text(chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(model="demo", temperature=0, **options)
        text, finish = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens < 60
    assert text == {"7, 8": "1, 2, 3, 4, 5, 6, ", "8": "1, 2, 3, 4, 5, 6, 7, "}.get(
        str(stop), "1, 2, 3, 4, 5, 6, 7"
    )
    assert finish == "stop"


def test_the_seed_decides_the_draw(client: openai.OpenAI) -> None:
    def draw(seed: int | None) -> str:
        answer = client.completions.create(
            model="demo", prompt=UNHEARD_OF, temperature=2, seed=seed, max_tokens=20
        )
        return answer.choices[0].text

    assert draw(11) == draw(11)
    assert draw(11) != draw(12)
    # Without a seed, each request is sampled differently. The engine's own default is one constant.
    assert len({draw(None) for _ in range(4)}) > 1


def test_sampling_is_the_default(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": "I am", "max_tokens": 12}
    greedy = client.completions.create(temperature=0, **options).choices[0].text
    drawn = {client.completions.create(**options).choices[0].text for _ in range(24)}
    assert drawn - {greedy}


def test_top_k_1_and_top_p_0_are_greedy(client: openai.OpenAI) -> None:
    greedy = _text(_chunks(client))
    assert _text(_chunks(client, temperature=2, extra_body={"top_k": 1})) == greedy
    assert _text(_chunks(client, temperature=2, top_p=0)) == greedy


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_penalties_reach_the_engine(client: openai.OpenAI) -> None:
    def logprobs(**penalty: float) -> tuple[float, ...]:
        answer = client.completions.create(
            model="demo",
            prompt="1, 2, 3, 4, 5,",
            temperature=0,
            max_tokens=20,
            logprobs=0,
            **penalty,
        )
        found = answer.choices[0].logprobs
        assert found is not None
        return tuple(round(value, 3) for value in found.token_logprobs or [])

    # Greedy text may be the same with a penalty, but the log probabilities of repeated tokens
    # differ.
    plain = logprobs()
    assert logprobs() == plain
    assert len({plain, logprobs(presence_penalty=2), logprobs(frequency_penalty=2)}) == 3


def test_a_conversation_with_all_roles_and_text_parts(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        temperature=0,
        messages=[
            {"role": "developer", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of Japan?"},
            {"role": "assistant", "content": "The capital of Japan is Tokyo."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is the capital of Italy?"}],
            },
        ],
        metadata={"trace": "x"},
        user="u",
    )
    assert "Rome" in (answer.choices[0].message.content or "")


async def test_the_async_client_streams(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(
        model="demo", messages=CAPITAL, temperature=0, stream=True
    )
    assert "Paris" in _text([chunk async for chunk in stream])


def test_completions(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 16}
    prompt = "The capital of France is"
    answer = client.completions.create(prompt=prompt, **options)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    # The space between the prompt and the answer belongs to the answer.
    assert answer.choices[0].text.startswith(" Paris")
    chunks = list(
        client.completions.create(
            prompt=prompt, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == answer.choices[0].text
    assert chunks[-1].usage == answer.usage
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == answer.choices[0].finish_reason


@pytest.mark.token_mode_only("streamed, it loses characters of several tokens", of=["ensemble"])
def test_several_choices_are_numbered_and_drawn_apart(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": UNHEARD_OF, "max_tokens": 12}
    options |= {"temperature": 2, "seed": 5, "n": 4}
    answer = client.completions.create(**options)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    [first] = client.completions.create(**options | {"n": 1}).choices
    assert first.text == texts[0]
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    )
    streamed = [""] * 4
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert chunks[-1].usage == answer.usage


def test_chat_choices_each_open_with_the_role_and_finish(client: openai.OpenAI) -> None:
    chunks = _chunks(client, n=3)
    for index in range(3):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "Paris" in "".join(c.delta.content or "" for c in own)
        assert own[-1].finish_reason == "stop"


def test_a_stop_string_ends_one_choice_alone(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo",
        prompt=["The capital of France is", "The capital of Italy is"],
        stop="Par",
        temperature=0,
        max_tokens=8,
    )
    assert answer.choices[0].text == " "
    assert "Rome" in answer.choices[1].text


@pytest.mark.token_mode_only("a text model takes no token ids", of=["ensemble", "bls"])
def test_prompts_as_lists_and_token_ids(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Japan is"]
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    options: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 8}
    texts = [client.completions.create(prompt=p, **options).choices[0].text for p in prompts]
    for form in (prompts, ids):
        answer = client.completions.create(prompt=form, n=2, **options)
        assert [c.text for c in answer.choices] == [texts[0], texts[0], texts[1], texts[1]]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(prompt=ids[0], **options).choices[0].text == texts[0]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=[10**6], **options)
    assert caught.value.param == "prompt"


def test_cached_tokens_of_a_prompt_that_was_seen_before(
    client: openai.OpenAI, request: pytest.FixtureRequest
) -> None:
    text = "Repeat: " + " ".join(f"word{n}" for n in range(60))
    messages: Any = [{"role": "user", "content": text}]
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=2)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens is not None
        assert details.cached_tokens < answer.usage.prompt_tokens
        cached.append(details.cached_tokens)
    assert cached[0] == 0
    # The engine caches complete blocks. It always computes the last token of a prompt.
    block = 32 if request.config.getoption("--triton-mode").startswith("llmapi") else 64
    assert cached[1] >= 64
    assert cached[1] % block == 0


def test_models(client: openai.OpenAI, request: pytest.FixtureRequest) -> None:
    model, *adapters = client.models.list().data
    assert model.id == "demo"
    takes_none = request.config.getoption("--triton-mode") == "llmapi-1.2"
    assert [adapter.id for adapter in adapters] == ([] if takes_none else ["ja", "zh"])
    assert model.object == "model"
    assert (model.model_extra or {})["max_model_len"] >= 2048
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"
