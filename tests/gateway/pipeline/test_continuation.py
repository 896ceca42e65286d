"""Failover of an answer: another replica continues at any token, and the client sees one answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.generation.engine_request import TextPrompt
from gateway.pipeline.continuation import Continuation
from gateway.scheduling.kinds import ModelVariant
from tests.support.capabilities import CAPABILITIES
from tests.support.fake_triton import Fault
from tests.support.generations import generation
from tests.support.in_process import ids_of, metric_of
from tests.support.two_replicas import (
    CONTINUED,
    GREEDY,
    PROMPT,
    TEXT,
    events,
    numbers,
    pair,
    read_choice,
    stream_fields,
)

CUDA = "[TensorRT-LLM][ERROR] CUDA runtime error: an illegal memory access"
STEP = "[TensorRT-LLM][ERROR] Encountered an error in forwardAsync function: x"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "error"), [("abort", ""), ("truncate", ""), ("error", CUDA)], ids=lambda x: x[:8]
)
async def test_wherever_a_replica_fails_the_answer_is_the_same(
    tmp_path: Path, fault: Fault, error: str, stream: bool
) -> None:
    async with pair(tmp_path) as it:
        it.first.error = error
        for step in range(1, len(it.ids)):
            await it.breaks(fault, step)
            answer = await it.ask(**GREEDY, **stream_fields(stream))
            choice = read_choice(answer, stream=stream)
            assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
            assert "continued" not in choice
            (rest,) = it.other.requests
            assert numbers(rest, "input_ids") == ids_of(tmp_path, PROMPT) + it.ids[:step]
            assert numbers(rest, "request_output_len") == [40 - step]
            assert rest.id != it.first.requests[-1].id
            assert metric_of(it.service, CONTINUED, cause="failed") == step


async def test_what_is_sampled_goes_on_by_another_seed_and_says_so(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        seeds = set()
        for stream in (True, False, False):
            await it.breaks("abort", 2)
            answer = await it.ask(seed=7, **stream_fields(stream))
            choice = read_choice(answer, stream=stream)
            assert (choice["text"], choice["continued"]) == (TEXT, True)
            assert numbers(it.first.requests[-1], "random_seed", "Q") == [7]
            seeds.add(numbers(it.other.requests[0], "random_seed", "Q")[0])
        # The same request always resumes with the same new seed.
        assert len(seeds) == 1
        assert seeds != {7}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("url", ["/v1/responses", "/v1/messages"])
async def test_every_protocol_tells_of_another_seed(tmp_path: Path, url: str, stream: bool) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"chat_template": template, "eos_token": "!"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    body = {"model": "m", "stream": stream}
    if url == "/v1/responses":
        body |= {"input": "xyz", "store": False, "max_output_tokens": 40}
    else:
        body |= {"messages": [{"role": "user", "content": "xyz"}], "max_tokens": 40}
    async with pair(tmp_path) as it:
        for temperature, mark in ((1, [True]), (0, [])):
            await it.breaks("abort", 2)
            asked = body | {"temperature": temperature}
            answer = await it.client.post(url, json=asked)
            assert answer.status_code == 200, answer.text
            lines = answer.text.splitlines() if stream else ["data: " + answer.text]
            data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
            told = [each.get("response", each) for each in data]
            assert [each["continued"] for each in told if "continued" in each] == mark
            assert len(it.other.requests) == 1


async def test_at_the_limit_nobody_is_asked_for_more(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        answer = await it.ask(max_tokens=3)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert not it.other.requests


async def test_behind_the_last_token_nobody_is_asked_for_more(tmp_path: Path) -> None:
    """The engine sent a stop id but failed before it reported the end. The answer is complete."""
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        answer = await it.ask(stop_token_ids=[it.ids[2]], **GREEDY)
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hé", "stop")
        assert not it.other.requests


async def test_what_the_other_refuses_is_no_mistake_of_the_clients(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        it.other.fault, it.other.step = "error", 0
        it.other.error = "Prompt length (6) exceeds maximum input length (5)"
        *_, last = events(await it.ask(stream=True, **GREEDY))
        assert (last["error"]["type"], last["error"]["code"]) == (
            "server_error",
            "engine_unavailable",
        )


async def test_several_choices_go_on_each_by_itself(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.breaks("abort", 2)
        answer = (await it.ask(n=3)).json()
        assert [choice["text"] for choice in answer["choices"]] == [TEXT] * 3
        assert answer["usage"]["completion_tokens"] == 3 * len(it.ids)
        assert len({request.id for request in it.other.requests}) == 3
        assert len({numbers(r, "random_seed", "Q")[0] for r in it.other.requests}) == 3


@pytest.mark.parametrize(
    ("case", "asked", "error"),
    [
        ("a step", GREEDY, STEP),
        ("off", GREEDY, CUDA),
    ],
)
async def test_what_cannot_go_on_ends_once_and_plainly(
    tmp_path: Path, case: str, asked: dict[str, Any], error: str
) -> None:
    settings = {"continuations": 0} if case == "off" else {}
    async with pair(tmp_path, **settings) as it:
        it.first.error = error
        await it.breaks("error" if error else "abort", 3)
        *frames, last = events(await it.ask(stream=True, **asked))
        assert "".join([frame["choices"][0]["text"] for frame in frames]) == "hé"
        assert last["error"]["type"] == "server_error"
        assert not it.other.requests


async def test_a_request_that_kills_engines_is_given_to_a_bounded_number(tmp_path: Path) -> None:
    async with pair(tmp_path, continuations=1) as it:
        await it.breaks("abort", 2)
        it.other.fault, it.other.step = "abort", 1
        before = len(it.first.requests)
        *_, last = events(await it.ask(stream=True, **GREEDY))
        assert last["error"]["code"] == "engine_unavailable"
        assert (len(it.first.requests) - before, len(it.other.requests)) == (1, 1)


def test_what_is_left_of_a_generation() -> None:
    of_ids, short, of_text = (
        ModelVariant(replace(CAPABILITIES, max_input_len=longest)) for longest in (None, 4, None)
    )
    whole = generation(
        min_tokens=3,
        forms={of_ids: None, short: None, of_text: TextPrompt("ab")},
        text=TextPrompt("ab"),
        stop=("x",),
    )
    going = Continuation(whole, 1)
    for count, min_tokens, kinds in ((2, 1, {of_ids, short}), (3, 0, {of_ids}), (4, 0, {of_ids})):
        going.ids.extend(range(len(going.ids), count))
        rest = going.remaining(failed=True)
        assert rest is not None
        assert (rest.prompt_ids.tolist(), rest.max_tokens) == ([1, 2, *range(count)], 5 - count)
        assert rest.params == replace(whole.params, min_tokens=min_tokens, usage=False)
        assert (set(rest.forms), rest.text) == (kinds, None)
    going.ids.append(4)
    assert going.remaining(failed=True) is None  # no tokens are left
    going.ids.pop()
    going.resume(rest, failed=True)
    assert going.remaining(failed=True) is None
    again = going.remaining(failed=False)
    assert again is not None
    assert len({whole.seed, rest.seed, again.seed}) == 3
    assert len({whole.request_id, rest.request_id, again.request_id}) == 3
    assert Continuation(replace(whole, beams=2), 1).remaining(failed=True) is None
    assert (
        Continuation(replace(whole, forms={of_text: TextPrompt("ab")}), 1).remaining(failed=True)
        is None
    )
