"""An answer goes on at another replica when its own fails, wherever that is: nobody can tell."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb

from gateway.generation import Sampling, TextPrompt
from gateway.pipeline.continuation import Continuation
from gateway.scheduling.kinds import Kind
from tests.support.capabilities import CAPABILITIES
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.generations import generation
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

TEXT = "héllo"
PROMPT = "xyz"
CONTINUED = "gateway_generations_continued_total"
GREEDY = {"temperature": 0}
CUDA = "[TensorRT-LLM][ERROR] CUDA runtime error: an illegal memory access"
STEP = "[TensorRT-LLM][ERROR] Encountered an error in forwardAsync function: x"


class Pair:
    """A replica that breaks, and one that has requests when the first cannot."""

    def __init__(self, client: httpx.AsyncClient, service: Any, ids: list[int]) -> None:
        self.client, self.service, self.ids = client, service, ids
        self.first: FakeTriton
        self.other: FakeTriton
        self.config: Path
        self.endpoints: tuple[str, str]

    async def breaks(self, fault: Fault, step: int) -> None:
        """At this token, in the next answer; the other is to give the others."""
        self.first.fault, self.first.step = fault, step
        self.other.tokens = self.ids[step:]
        self.other.requests.clear()

    async def ask(self, **more: Any) -> httpx.Response:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 40} | more
        return await self.client.post("/v1/completions", json=body)


@asynccontextmanager
async def pair(folder: Path, **settings: Any) -> AsyncIterator[Pair]:
    save_tokenizer(folder)
    ids = ids_of(folder, TEXT)
    first, other = (FakeTriton(tokens=ids, fault=None, step=0) for _ in range(2))
    async with serving(first) as one, serving(other) as two:
        config = folder / "c.yaml"
        _write(config, one, two)
        async with running(folder, one, config=config, allow_anonymous=True, **settings) as (
            client,
            service,
            _,
        ):
            while not all(
                metric_of(service, "gateway_replica_ready", replica=r) for r in (one, two)
            ):
                await asyncio.sleep(0.01)
            made = Pair(client, service, ids)
            made.first, made.other, made.config, made.endpoints = first, other, config, (one, two)
            yield made


def _write(config: Path, one: str, two: str, *, drain: bool = False) -> None:
    replicas = [{"endpoint": one, "drain": drain}, {"endpoint": two, "weight": 0}]
    config.write_text(yaml.safe_dump({"anonymous": True, "replicas": replicas}))


def _numbers(request: pb.ModelInferRequest, name: str, code: str = "i") -> list[int]:
    names = [tensor.name for tensor in request.inputs]
    return array(code, request.raw_input_contents[names.index(name)]).tolist()


def _events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def _whole(answer: httpx.Response, *, stream: bool) -> dict[str, Any]:
    """The choice; of a stream, put together from its one beginning to its one end."""
    assert answer.status_code == 200, answer.text
    if not stream:
        found: dict[str, Any] = answer.json()
        assert found["usage"]["completion_tokens"] == len(TEXT.encode())
        assert found["usage"]["prompt_tokens"] == len(PROMPT)
        return found["choices"][0]  # type: ignore[no-any-return]
    *frames, usage = _events(answer)
    assert usage["usage"]["completion_tokens"] == len(TEXT.encode())
    assert usage["usage"]["prompt_tokens"] == len(PROMPT)
    choices = [frame["choices"][0] for frame in frames]
    assert [bool(choice["finish_reason"]) for choice in choices[:-1]] == [False] * (
        len(choices) - 1
    )
    return choices[-1] | {"text": "".join([choice["text"] for choice in choices])}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "error"), [("abort", ""), ("truncate", ""), ("error", CUDA)], ids=lambda x: x[:8]
)
async def test_wherever_a_replica_fails_the_answer_is_the_same(
    tmp_path: Path, fault: Fault, error: str, stream: bool
) -> None:
    options = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    async with pair(tmp_path) as it:
        it.first.error = error
        for step in range(1, len(it.ids)):
            await it.breaks(fault, step)
            answer = await it.ask(**GREEDY, **options)
            choice = _whole(answer, stream=stream)
            assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
            assert "continued" not in choice
            (rest,) = it.other.requests
            assert _numbers(rest, "input_ids") == ids_of(tmp_path, PROMPT) + it.ids[:step]
            assert _numbers(rest, "request_output_len") == [40 - step]
            assert rest.id != it.first.requests[-1].id
            assert metric_of(it.service, CONTINUED, cause="failed") == step


async def test_what_is_sampled_goes_on_by_another_seed_and_says_so(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        seeds = set()
        for stream in (True, False, False):
            await it.breaks("abort", 2)
            options = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await it.ask(seed=7, stream=stream, **options)
            choice = _whole(answer, stream=stream)
            assert (choice["text"], choice["continued"]) == (TEXT, True)
            assert _numbers(it.first.requests[-1], "random_seed", "Q") == [7]
            seeds.add(_numbers(it.other.requests[0], "random_seed", "Q")[0])
        # The same request goes on alike.
        assert len(seeds) == 1
        assert seeds != {7}


async def test_at_the_limit_nobody_is_asked_for_more(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        answer = await it.ask(max_tokens=3)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert not it.other.requests


async def test_several_choices_go_on_each_by_itself(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.breaks("abort", 2)
        answer = (await it.ask(n=3)).json()
        assert [choice["text"] for choice in answer["choices"]] == [TEXT] * 3
        assert answer["usage"]["completion_tokens"] == 3 * len(it.ids)
        assert len({request.id for request in it.other.requests}) == 3
        assert len({_numbers(r, "random_seed", "Q")[0] for r in it.other.requests}) == 3


@pytest.mark.parametrize(
    ("case", "asked", "error"),
    [
        ("guided", {"response_format": {"type": "json_object"}}, ""),
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
        *frames, last = _events(await it.ask(stream=True, **asked))
        assert "".join([frame["choices"][0]["text"] for frame in frames]) == "hé"
        assert last["error"]["type"] == "server_error"
        assert not it.other.requests


async def test_a_request_that_kills_engines_is_given_to_a_bounded_number(tmp_path: Path) -> None:
    async with pair(tmp_path, continuations=1) as it:
        await it.breaks("abort", 2)
        it.other.fault, it.other.step = "abort", 1
        before = len(it.first.requests)
        *_, last = _events(await it.ask(stream=True, **GREEDY))
        assert last["error"]["code"] == "engine_unavailable"
        assert (len(it.first.requests) - before, len(it.other.requests)) == (1, 1)


async def test_a_drained_replica_sends_its_streams_away(tmp_path: Path) -> None:
    async with pair(tmp_path, replica_drain_grace=0.05) as it:
        await it.breaks("slow", 2)
        asked = asyncio.create_task(it.ask(**GREEDY))
        while not it.first.reached:
            await asyncio.sleep(0.01)
        _write(it.config, *it.endpoints, drain=True)
        (drained,) = [r for r in it.service.replicas if r.endpoint == it.endpoints[0]]
        while not drained.sends_away:
            await asyncio.sleep(0.01)
        # What it still says is heard; the other goes on behind that.
        it.other.tokens = it.ids[3:]
        it.first.released.set()
        answer = (await asked).json()
        assert answer["choices"][0]["text"] == TEXT
        assert _numbers(it.other.requests[0], "request_output_len") == [37]
        while it.first.stopped != [it.first.requests[-1].id]:
            await asyncio.sleep(0.01)
        assert metric_of(it.service, CONTINUED, cause="drained") == 1
        assert metric_of(it.service, "gateway_stops_total", reason="moved") == 1
        assert not metric_of(it.service, "gateway_replica_failing", replica=it.endpoints[0])


def test_what_is_left_of_a_generation() -> None:
    of_ids, short, of_text = (
        Kind(replace(CAPABILITIES, max_input_len=longest)) for longest in (None, 4, None)
    )
    whole = generation(
        sampling=Sampling(min_tokens=3),
        forms={of_ids: None, short: None, of_text: TextPrompt("ab")},
        text=TextPrompt("ab"),
        stop=("x",),
    )
    going = Continuation(whole, 1)
    for count, min_tokens, kinds in ((2, 1, {of_ids, short}), (3, 0, {of_ids}), (4, 0, {of_ids})):
        going.ids.extend(range(len(going.ids), count))
        rest = going.rest(failed=True)
        assert rest is not None
        assert (rest.prompt_ids, rest.max_tokens) == ([1, 2, *range(count)], 5 - count)
        assert rest.params == replace(
            whole.params, sampling=replace(whole.params.sampling, min_tokens=min_tokens)
        )
        assert (set(rest.forms), rest.text) == (kinds, None)
    going.ids.append(4)
    assert going.rest(failed=True) is None  # nothing is left
    going.ids.pop()
    going.goes_on(rest, failed=True)
    assert going.rest(failed=True) is None
    again = going.rest(failed=False)
    assert again is not None
    assert len({whole.seed, rest.seed, again.seed}) == 3
    assert len({whole.request_id, rest.request_id, again.request_id}) == 3
    assert Continuation(replace(whole, beams=2), 1).rest(failed=True) is None
    assert (
        Continuation(replace(whole, forms={of_text: TextPrompt("ab")}), 1).rest(failed=True) is None
    )
