"""Extension parameters: each reaches the engine and has its documented effect."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from ops.commands.up import DEMO_MODEL

COUNT = [{"role": "user", "content": "Count from 1 to 30"}]
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def _chat(client: openai.OpenAI, messages: Any = COUNT, **fields: Any) -> tuple[str, str, int]:
    extra = {key: fields.pop(key) for key in list(fields) if key in EXTENSIONS}
    answer = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, extra_body=extra, **fields
    )
    assert answer.usage is not None
    [choice] = answer.choices
    return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens


EXTENSIONS = {
    "length_penalty",
    "return_token_ids",
    "use_beam_search",
    "add_generation_prompt",
    "bad_words",
    "chat_template_kwargs",
    "continue_final_message",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_tokens",
    "repetition_penalty",
    "skip_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "truncate_prompt_tokens",
}


@pytest.mark.llmapi_refuses
def test_logit_bias_forbids_and_forces_tokens(client: openai.OpenAI) -> None:
    plain, _, _ = _chat(client, max_tokens=5)
    first = TOKENIZER.encode(plain).ids[0]
    other = TOKENIZER.token_to_id("z")
    assert not _chat(client, max_tokens=1, logit_bias={str(first): -100})[0].startswith(plain[0])
    assert _chat(client, max_tokens=3, logit_bias={str(other): 100})[0] == "zzz"


@pytest.mark.llmapi_refuses
def test_bad_words_never_appear(client: openai.OpenAI) -> None:
    assert "4" in _chat(client, max_tokens=20)[0]
    assert "4" not in _chat(client, max_tokens=20, bad_words=["4"])[0]


@pytest.mark.llmapi_refuses
def test_bad_words_never_appear_behind_a_space(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert _chat(client, question)[0] == "The capital of France is Paris."
    assert "Paris" not in _chat(client, question, max_tokens=20, bad_words=["Paris"])[0]


@pytest.mark.llmapi_refuses
def test_min_tokens_holds_the_end_back(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    _, _, tokens = _chat(client, question)
    assert tokens < 20
    assert _chat(client, question, min_tokens=30, max_tokens=60)[2] >= 30


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model shows no token ids")
def test_min_tokens_holds_every_end_back(client: openai.OpenAI) -> None:
    """Check each end id, not only the one that the engine knows and suppresses itself."""
    further = TOKENIZER.token_to_id("<|endoftext|>")
    config = json.loads((DEMO_MODEL / "generation_config.json").read_text())
    assert config["eos_token_id"].index(further) > 0
    always: dict[str, Any] = {"logit_bias": {str(further): 100}, "max_tokens": 40}
    assert _chat(client, **always)[1:] == ("stop", 1)
    assert _chat(client, **always, min_tokens=10)[1:] == ("stop", 11)
    assert _chat(client, **always, min_tokens=10, ignore_eos=True)[1:] == ("length", 40)


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model shows no token ids")
def test_min_tokens_holds_stop_token_ids_back(client: openai.OpenAI) -> None:
    four, ten = TOKENIZER.encode("4").ids, _chat(client, max_tokens=10)
    assert _chat(client, stop_token_ids=four)[2] < 10
    text, finish, tokens = _chat(client, stop_token_ids=four, min_tokens=10)
    assert text.startswith(ten[0])
    assert (finish, tokens > 10, text[-1]) == ("stop", True, "4")


@pytest.mark.llmapi_refuses
def test_ignore_eos_goes_on_to_the_limit(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    _, finish, tokens = _chat(client, question, ignore_eos=True, max_tokens=40)
    assert (finish, tokens) == ("length", 40)


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model shows no token ids")
def test_stop_token_ids(client: openai.OpenAI) -> None:
    four = TOKENIZER.token_to_id("4")
    text, finish, _ = _chat(client, stop_token_ids=[four])
    assert finish == "stop"
    assert text.startswith("1, 2, 3, ")
    assert "5" not in text


@pytest.mark.parametrize(("include", "text"), [(False, "1, 2, 3, "), (True, "1, 2, 3, 4, 5")])
def test_the_stop_string_can_be_included(client: openai.OpenAI, include: bool, text: str) -> None:
    assert _chat(client, stop="4, 5", include_stop_str_in_output=include)[:2] == (text, "stop")


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("postprocessing leaves special tokens out")
def test_special_tokens_can_be_shown(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "<|im_end|>" not in _chat(client, question, **options)[0]
    assert "<|im_end|>" in _chat(client, question, skip_special_tokens=False, **options)[0]


@pytest.mark.llmapi_refuses
def test_repetition_penalty(client: openai.OpenAI) -> None:
    # With `ignore_eos` the greedy model repeats itself, until repetition is penalised.
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 80}
    question = [{"role": "user", "content": "🦉"}]
    plain, _, _ = _chat(client, question, **options)
    assert _chat(client, question, repetition_penalty=2.0, **options)[0] != plain


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model tokenizes the prompt itself")
def test_truncate_prompt_tokens_keeps_the_end(client: openai.OpenAI) -> None:
    prompt = "Nothing of this matters at all. The capital of France is"
    size = len(TOKENIZER.encode("The capital of France is").ids)
    answer = client.completions.create(
        model="demo",
        prompt=prompt,
        temperature=0,
        max_tokens=4,
        extra_body={"truncate_prompt_tokens": size},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == size
    assert "Paris" in answer.choices[0].text


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model tokenizes the prompt itself")
def test_truncation_side_says_what_goes(client: openai.OpenAI) -> None:
    prompt = "The capital of France is" + " nothing of this matters" * 200
    size = len(TOKENIZER.encode("The capital of France is").ids)
    for side, kept in (("right", slice(0, size)), ("left", slice(-size, None))):
        answer: Any = client.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=1,
            echo=True,
            extra_body={
                "truncate_prompt_tokens": size,
                "truncation_side": side,
                "return_token_ids": True,
            },
        )
        [choice] = answer.choices
        assert choice.prompt_token_ids == TOKENIZER.encode(prompt).ids[kept]
        assert choice.text.startswith(TOKENIZER.decode(choice.prompt_token_ids))


def test_the_last_message_can_be_continued(client: openai.OpenAI) -> None:
    messages = [*COUNT, {"role": "assistant", "content": "1, 2, 3,"}]
    text, _, _ = _chat(client, messages, continue_final_message=True, add_generation_prompt=False)
    assert text.startswith(" 4, 5") or text.startswith("4, 5")
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(client, messages, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


def _valid(text: str | None) -> bool:
    try:
        value = json.loads(text or "")
    except ValueError:
        return False
    return set(value) == {"city", "size"} and 1 <= value["size"] <= 9


@pytest.mark.slow
@pytest.mark.llmapi_refuses
def test_a_schema_that_the_model_breaks_alone_is_always_met(
    client: openai.OpenAI, request: pytest.FixtureRequest
) -> None:
    question = [{"role": "user", "content": "Tell me about Paris."}]
    # A text model uses the same engine. A few answers show that the schema is passed on.
    many = 100 if request.config.getoption("--triton-mode") == "token" else 10

    options: dict[str, Any] = {"model": "demo", "messages": question, "max_tokens": 200}
    alone = client.chat.completions.create(n=many // 5, **options)
    assert not any(_valid(choice.message.content) for choice in alone.choices)
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    guided = client.chat.completions.create(n=many, response_format=wanted, **options)
    broken = [c.message.content for c in guided.choices if not _valid(c.message.content)]
    assert broken == []


@pytest.mark.llmapi_refuses
def test_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello!"}],
        response_format={"type": "json_object"},
        max_tokens=300,
        seed=3,
    )
    text, finish = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert finish == "length" or isinstance(json.loads(text), dict)


@pytest.mark.llmapi_refuses
def test_a_schema_beside_json_object_holds(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_object", "schema": SCHEMA}
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello!"}],
        response_format=wanted,
        max_tokens=200,
        n=5,
    )
    assert all(_valid(choice.message.content) for choice in answer.choices)


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("the ensemble decodes each token alone", of=["ensemble"])
@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"choice": ["yes", "no", "说不定"]}, {"yes", "no", "说不定"}),
        ({"regex": "[ab]{3}"}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"json": {"enum": [1, 2]}}, {"1", "2"}),
    ],
)
def test_structured_outputs(
    client: openai.OpenAI, constraint: dict[str, Any], allowed: set[str]
) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hello!"}],
            seed=seed,
            extra_body={"structured_outputs": constraint},
        )
        assert answer.choices[0].message.content in allowed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop": ["", "a"]}, "stop[0]"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ],
)
def test_bad_values(client: openai.OpenAI, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(client, **fields)
    assert caught.value.param == param


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a BLS model that accumulates tokens has one beam", of=["bls"])
def test_beam_search_finds_the_likeliest(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": "The capital of", "max_tokens": 6}
    options["extra_body"] = {"use_beam_search": True}
    answer = client.completions.create(n=3, **options)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert client.completions.create(n=3, **options).choices[0].text == texts[0]
    assert answer.usage is not None
    assert 3 <= answer.usage.completion_tokens <= 18
    both = client.completions.create(
        model="demo",
        prompt=["The capital of", "1, 2, 3,"],
        n=2,
        max_tokens=6,
        extra_body={"use_beam_search": True},
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == client.completions.create(n=2, **options).choices[0].text
    echoed = client.completions.create(n=3, echo=True, **options).choices
    assert [choice.text for choice in echoed] == ["The capital of" + text for text in texts]


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model shows no steps")
def test_a_beam_search_is_charged_what_the_engine_did(client: openai.OpenAI) -> None:
    """Check the usage of a beam search with a stop string.

    With `min_tokens` the gateway sends no stop words, so the engine generates all tokens of both
    beams.
    """
    answer = client.chat.completions.create(
        model="demo",
        messages=COUNT,
        n=2,
        max_tokens=12,
        stop=["2"],
        extra_body={"use_beam_search": True, "min_tokens": 1, "ignore_eos": True},
    )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5, "extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"stream": True, "extra_body": {"use_beam_search": True}}, "stream"),
        ({"logprobs": 1, "extra_body": {"use_beam_search": True}}, "logprobs"),
        ({"extra_body": {"length_penalty": 2.0}}, "length_penalty"),
    ],
)
def test_what_beams_cannot_do(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="x", max_tokens=2, **fields)
    assert caught.value.param == param


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model shows no token ids")
@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_can_be_returned(client: openai.OpenAI, stream: bool) -> None:
    prompt = "The capital of France is"
    answer: Any = client.completions.create(
        model="demo",
        prompt=prompt,
        temperature=0,
        max_tokens=8,
        stream=stream,
        extra_body={"return_token_ids": True},
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    given = [choice.prompt_token_ids for choice in choices if hasattr(choice, "prompt_token_ids")]
    ids = [i for choice in choices for i in getattr(choice, "token_ids", None) or []]
    assert given == [TOKENIZER.encode(prompt).ids]
    assert TOKENIZER.decode(ids) == "".join(choice.text for choice in choices)


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model shows no token ids")
def test_each_choice_has_the_ids_of_its_own_prompt(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "1, 2,"]
    answer = client.completions.create(
        model="demo",
        prompt=prompts,
        max_tokens=2,
        n=1,
        best_of=3,
        extra_body={"return_token_ids": True},
    )
    given = [getattr(choice, "prompt_token_ids", None) for choice in answer.choices]
    assert given == [TOKENIZER.encode(prompt).ids for prompt in prompts]


@pytest.mark.llmapi_refuses
@pytest.mark.token_mode_only("a text model shows no token ids")
@pytest.mark.parametrize("stream", [True, False])
def test_the_ids_of_a_chats_prompt_stand_beside_its_choices(
    client: openai.OpenAI, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": COUNT, "max_tokens": 4, "n": 2}
    answer: Any = client.chat.completions.create(
        stream=stream, extra_body={"return_token_ids": True}, **asked
    )
    parts = list(answer) if stream else [answer]
    given = [part.prompt_token_ids for part in parts if hasattr(part, "prompt_token_ids")]
    assert len(given) == (2 if stream else 1), "a stream tells them with each choice's first chunk"
    assert all("Count from 1 to 30" in TOKENIZER.decode(ids) for ids in given)
    choices = [choice for part in parts for choice in part.choices]
    assert not any(hasattr(choice, "prompt_token_ids") for choice in choices)
    assert sum(len(getattr(choice, "token_ids", None) or []) for choice in choices) == 8


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tools", [True, False])
def test_a_chat_can_repeat_what_it_goes_on_from(
    client: openai.OpenAI, stream: bool, tools: bool
) -> None:
    said = [{"type": "text", "text": "1, 2,"}, {"type": "text", "text": " 3,"}]
    function = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    more: dict[str, Any] = {"tools": [{"type": "function", "function": function}]} if tools else {}
    answer: Any = client.chat.completions.create(
        model="demo",
        messages=[*COUNT, {"role": "assistant", "content": said}],  # type: ignore[list-item]
        temperature=0,
        max_tokens=6,
        stream=stream,
        extra_body={"continue_final_message": True, "echo": True},
        **more,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert text.startswith("1, 2, 3, 4")
    # The echoed messages of other roles are not part of the answer.
    question: Any = client.chat.completions.create(
        model="demo", messages=COUNT, temperature=0, max_tokens=6, extra_body={"echo": True}
    )
    assert question.choices[0].message.content.startswith("1, 2")
