"""Log probabilities of the chosen tokens and of alternatives, streamed and not."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "Repeat: 你好 🦉 owls"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": QUESTION, "logprobs": True}


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_chosen_tokens_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(top_logprobs=3, temperature=0, **CHAT)
    [choice] = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert answer.usage is not None
    assert len(content) == answer.usage.completion_tokens
    raw = b"".join(bytes(token.bytes or []) for token in content)
    assert raw.decode() == choice.message.content
    for token in content:
        assert token.logprob <= 0
        values = [other.logprob for other in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        # Greedy decoding chooses the likeliest token, and both fields have the same value for it.
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-3)
        assert sum(map(math.exp, values)) <= 1.0001
    assert any(token.token.startswith("bytes:") for token in content), "characters do split"


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_without_alternatives_only_the_chosen_ones_come(client: openai.OpenAI) -> None:
    options = CHAT | {"temperature": 0}
    plain = client.chat.completions.create(**options).choices[0].logprobs
    rich = client.chat.completions.create(top_logprobs=1, **options).choices[0].logprobs
    assert plain is not None
    assert rich is not None
    assert plain.content is not None
    assert rich.content is not None
    assert all(token.top_logprobs == [] for token in plain.content)
    # The engine rounds the sums differently when it also computes alternatives.
    values = [t.logprob for t in rich.content]
    assert [t.logprob for t in plain.content] == pytest.approx(values, abs=1e-6)
    # At temperature 0 the likeliest token is chosen.
    assert [t.top_logprobs[0].logprob for t in rich.content] == values


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_logprobs_equal_whole_ones(client: openai.OpenAI, temperature: float) -> None:
    options = CHAT | {"temperature": temperature, "seed": 3, "top_logprobs": 2, "max_tokens": 40}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, **options):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs else []
    assert [t.model_dump() for t in streamed] == [t.model_dump() for t in whole.content or []]


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_completions_have_offsets(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt="The capital of France is", temperature=0, max_tokens=8, logprobs=2
    )
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text.startswith(token, offset) or token.startswith("<|")
    assert logprobs.top_logprobs is not None
    assert all(len(others) == 2 for others in logprobs.top_logprobs)


def test_top_logprobs_alone_make_no_sense(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=QUESTION, top_logprobs=2)
    assert caught.value.param == "top_logprobs"


PROMPT = "The capital of France is"


def test_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0}
    plain = client.completions.create(max_tokens=8, **options)
    echoed = client.completions.create(max_tokens=8, echo=True, **options)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    assert echoed.usage is not None
    assert plain.usage is not None
    assert echoed.usage.completion_tokens == plain.usage.completion_tokens
    chunks = client.completions.create(max_tokens=8, echo=True, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, max_tokens: int) -> None:
    answer = client.completions.create(
        model="demo",
        prompt=PROMPT,
        temperature=0,
        max_tokens=max_tokens,
        echo=True,
        logprobs=2,
    )
    [choice] = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    # `top_logprobs` includes the chosen token, even if it is not among the two likeliest.
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    assert all(len(top) in (2, 3) and top[token] == value for token, value, top in list(rows)[1:])
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text.startswith(token, offset) or token.startswith("<|")
    if max_tokens == 0:
        assert choice.text == PROMPT
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 0
    # "Paris" has the same log probability in the prompt as when it is generated.
    scored = client.completions.create(
        model="demo", prompt=PROMPT + " Paris", max_tokens=0, echo=True, logprobs=0
    )
    generated = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=0
    )
    given, made = scored.choices[0].logprobs, generated.choices[0].logprobs
    assert given is not None
    assert made is not None
    assert given.tokens is not None
    assert made.tokens is not None
    assert made.token_logprobs is not None
    assert made.top_logprobs == [{made.tokens[0]: made.token_logprobs[0]}]
    assert made.tokens is not None
    position = len(given.tokens) - 1 - given.tokens[::-1].index(made.tokens[0])
    assert given.token_logprobs is not None
    assert made.token_logprobs is not None
    assert given.token_logprobs[position] == pytest.approx(made.token_logprobs[0], abs=1e-3)


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_prompt_logprobs_are_those_of_an_echo(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "1, 2, 3, 4"]
    asked: dict[str, Any] = {"model": "demo", "prompt": prompts, "n": 2, "max_tokens": 1}
    wanted: dict[str, Any] = {"prompt_logprobs": 3, "return_token_ids": True}
    answer: Any = client.completions.create(
        echo=True, logprobs=1, extra_body=wanted | {"return_tokens_as_token_ids": True}, **asked
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        first, *told = choice.prompt_logprobs
        ids = choice.prompt_token_ids
        assert first is None
        assert choice.logprobs.tokens == [f"token_id:{i}" for i in ids + choice.token_ids]
        for token_id, entry, value, top in zip(
            ids[1:],
            told,
            choice.logprobs.token_logprobs[1:],
            choice.logprobs.top_logprobs[1:],
            strict=False,
        ):
            own = entry[str(token_id)]
            assert next(iter(entry)) == str(token_id)
            assert own["logprob"] == value
            # The entry has the token itself and the three likeliest tokens, which may include it.
            ranks = {told["rank"] for told in entry.values()}
            assert ranks == {1, 2, 3, own["rank"]}
            assert len(top) in (1, 2)
            best = sorted(entry.values(), key=lambda told: told["rank"])
            assert [told["logprob"] for told in best] == sorted(
                (told["logprob"] for told in entry.values()), reverse=True
            )
        text = "".join(
            entry[str(i)]["decoded_token"] for i, entry in zip(ids[1:], told, strict=True)
        )
        assert choice.text.partition(text)[1] == text
    scored: Any = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=0, extra_body={"prompt_logprobs": 3}
    )
    assert scored.choices[0].prompt_logprobs == answer.choices[0].prompt_logprobs
    assert (scored.choices[0].text, scored.choices[0].finish_reason) == ("", "length")


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_those_of_a_chat_stand_beside_its_choices(client: openai.OpenAI) -> None:
    wanted = {"prompt_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    answer: Any = client.chat.completions.create(n=2, max_tokens=3, extra_body=wanted, **CHAT)
    first, *told = answer.prompt_logprobs
    assert first is None
    assert [list(entry) for entry in told] == [[str(i)] for i in answer.prompt_token_ids[1:]]
    for choice in answer.choices:
        tokens = [entry.token for entry in choice.logprobs.content]
        assert tokens == [f"token_id:{i}" for i in choice.token_ids]
        assert not hasattr(choice, "prompt_logprobs")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(stream=True, extra_body={"prompt_logprobs": 1}, **CHAT)
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_offsets_count_characters_of_any_script(client: openai.OpenAI) -> None:
    prompt = "美国的首都在哪里? 😀🎉 end"
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    offsets = logprobs.text_offset or []
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(answer.choices[0].text)
    for token, offset in zip(logprobs.tokens or [], offsets, strict=True):
        known = token.startswith(("bytes:", "<|"))
        assert known or answer.choices[0].text.startswith(token, offset)


@pytest.mark.token_mode_only("a text model does not say which tokens log probabilities belong to")
def test_best_of_keeps_the_likeliest(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": "I am", "max_tokens": 8, "seed": 1}
    every = client.completions.create(n=6, logprobs=0, temperature=1.5, **options)
    best = client.completions.create(n=2, best_of=6, temperature=1.5, **options)

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return float(sum(values) / max(len(values), 1))

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage == every.usage


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="x", **fields)
    assert caught.value.param == param
