"""Ends of an answer during failover: the answer ends once, and all its resources are released."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.api.openai.answers import DeltaCollector
from gateway.generation.options import GenerationParams, Options
from gateway.observability.request_context import RequestContext
from gateway.pipeline.generate import generate
from gateway.pipeline.prepare import prepare
from ops.local_stack.ports import PortClaims
from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer
from tests.support.two_replicas import GREEDY, TEXT, Pair, events, pair, read_choice, stream_fields


async def until_idle(it: Pair) -> None:
    async with asyncio.timeout(300):
        while it.service.admission.in_flight or any(r.in_flight for r in it.service.replicas):
            await asyncio.sleep(0.01)
    assert not metric_of(it.service, "gateway_generations_in_flight")


@pytest.mark.parametrize("n", [1, 2])
async def test_the_deadline_comes_while_another_begins(tmp_path: Path, n: int) -> None:
    clock = EventClock()
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        it.other.fault, it.other.step = "stall", 0
        body = {"model": "m", "prompt": "x", "stream": True, "n": n, **GREEDY}
        asked = it.client.post("/v1/completions", json=body, timeout=None)
        answer = await clock.leap_once(lambda: it.other.reached == n, asked)
        assert events(answer)[-1]["error"]["code"] == "timeout"
        await until_idle(it)
        async with asyncio.timeout(300):
            while len(it.other.stopped) < n:
                await asyncio.sleep(0.01)


async def test_the_client_leaves_while_another_begins(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        it.other.fault, it.other.step = "stall", 0
        asked = asyncio.create_task(it.ask(stream=True, **GREEDY))
        async with asyncio.timeout(300):
            while not it.other.reached:
                await asyncio.sleep(0.01)
            asked.cancel()
            while not it.other.stopped:
                await asyncio.sleep(0.01)
        assert it.other.stopped == [it.other.requests[0].id]
        await until_idle(it)


async def test_what_was_cut_short_while_another_begins_is_whole(tmp_path: Path) -> None:
    """A token limit cuts the answer short during failover. The answer ends with `length`."""
    clock, sink = EventClock(), DeltaCollector(1)
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        it.other.fault, it.other.step = "stall", 0
        options = Options(seed=1, params=GenerationParams(temperature=0))
        batch = await prepare(it.service, ["x"], options, chat=False)

        def cut() -> bool:
            if it.other.reached:
                batch.meter.running[0].cut_short()
            return bool(it.other.reached)

        asked = generate(it.service, RequestContext("test"), batch, sink)
        await clock.leap_once(cut, asked)
        (deltas,) = sink.received
        assert [delta.finish for delta in deltas if delta.finish] == ["length"]
        assert "".join([delta.text for delta in deltas]) == TEXT[:2]


async def test_a_message_is_read_on(tmp_path: Path) -> None:
    """Reasoning, content and tool calls are the same wherever the first replica has failed."""
    text = '<think>hé</think>ok<tool_call>{"name": "f", "arguments": {"a": "ü"}}</tool_call>'
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "!"})
    )
    settings = {"max_seq_len": 512, "tool_form": "hermes", "reasoning_parser": "qwen3"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "m", "tools": [tool], "stop": ["#"], "temperature": 0, "max_tokens": 200}
    body["messages"] = [{"role": "user", "content": "x"}]
    async with pair(tmp_path, text, **settings) as it:
        undisturbed = await _message(it, body, stream=False)
        assert undisturbed["reasoning_content"] == "hé"
        assert undisturbed["content"] == "ok"
        assert undisturbed["tool_calls"] == [("f", '{"a": "ü"}')]
        for step in range(1, len(it.ids), 3):
            await it.breaks("abort", step)
            assert await _message(it, body, stream=step % 2 == 0) == undisturbed
            assert len(it.other.requests) == 1


async def _message(it: Pair, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    answer = await it.client.post("/v1/chat/completions", json=body | stream_fields(stream))
    if not stream:
        (choice,) = answer.json()["choices"]
        parts = [choice["message"]]
    else:
        *frames, _ = events(answer)
        choices = [frame["choices"][0] for frame in frames]
        parts, choice = [each["delta"] for each in choices], choices[-1]
        assert [part for part in parts if "role" in part] == parts[:1]
    told: dict[str, Any] = {"finish": choice["finish_reason"]}
    for name in ("content", "reasoning_content"):
        told[name] = "".join([part.get(name) or "" for part in parts])
    calls = [each["function"] for part in parts for each in part.get("tool_calls") or ()]
    names = [call["name"] for call in calls if call.get("name")]
    told["tool_calls"] = [(*names, "".join([call.get("arguments") or "" for call in calls]))]
    return told


async def test_where_the_others_queue_is_full_it_waits(tmp_path: Path) -> None:
    """The other replica may be full, as all streams of the failed replica move there at once."""
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        it.other.fault, it.other.step = "error", 0  # the error of a full queue
        asked = asyncio.create_task(it.ask(**GREEDY))
        async with asyncio.timeout(300):
            while it.other.reached < 2:
                await asyncio.sleep(0.01)
        it.other.fault = None
        assert read_choice(await asked, stream=False)["text"] == TEXT
        assert not it.replica(1).breaker.is_open
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        it.other.fault, it.other.step = "error", 0
        body = {"model": "m", "prompt": "x", "max_tokens": 40, **GREEDY}
        late = await it.client.post(
            "/v1/completions", json=body, headers={"x-request-timeout": "3"}
        )
        assert late.json()["error"]["code"] == "timeout"
        await until_idle(it)


@pytest.mark.parametrize("step", [0, 3])
async def test_one_that_is_about_to_be_back_is_waited_for(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait for a replica to recover, whether or not they have a first token."""
    monkeypatch.setattr("gateway.scheduling.replicas._RECOVERY_WAIT_S", 60.0)
    save_tokenizer(tmp_path)
    ids, config = ids_of(tmp_path, TEXT), tmp_path / "c.yaml"
    first = FakeTriton(tokens=ids, fault="abort", step=step)
    other = FakeTriton(tokens=ids[step:], fault=None, step=0)
    with PortClaims() as claims:
        away = f"127.0.0.1:{claims.take_free()}"
        async with serving(first) as one:
            config.write_text(yaml.safe_dump({"anonymous": True, "replicas": [one, away]}))
            settings = {"config": config, "allow_anonymous": True}
            async with running(tmp_path, one, **settings) as (client, _, _):
                body = {"model": "m", "prompt": "x", "max_tokens": 40, **GREEDY}
                asked = asyncio.create_task(client.post("/v1/completions", json=body))
                while not first.reached:
                    await asyncio.sleep(0.01)
                async with serving(other, away):
                    answer = await asked
    assert answer.json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_and_what_is_held_back_for_them(tmp_path: Path, stream: bool) -> None:
    async with pair(tmp_path, "abcXYZd") as it:
        for step in range(1, 7):
            await it.breaks("abort", step)
            answer = await it.ask(stop=["XYZ", "bcQ"], **GREEDY, **stream_fields(stream))
            choice = read_choice(answer, stream=stream, tokens=6)
            assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


class Poisoned(FakeTriton):
    """A Triton whose engine dies of each request, alternately before and after the first token."""

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.step = len(self.requests) % 2
        async for response in super().ModelStreamInfer(requests, context):
            yield response


class OneBreaksThenAnother(FakeTriton):
    """A Triton that fails the first request at the fourth token and the second at once.

    The third request gets the remaining tokens.
    """

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        faults: list[Fault | None] = ["abort", "error", None]
        self.fault = faults[len(self.requests)]
        self.step = 0 if self.requests else 3
        if self.fault is None:
            self.tokens = self.tokens[3:]
        async for response in super().ModelStreamInfer(requests, context):
            yield response


@asynccontextmanager
async def fleet(
    folder: Path, engine: FakeTriton, count: int, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Run a gateway with `count` replicas, all served by `engine`. Yield a client."""
    config = folder / "c.yaml"
    async with AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(serving(engine)) for _ in range(count)]
        config.write_text(yaml.safe_dump({"anonymous": True, "replicas": endpoints}))
        settings |= {"config": config, "allow_anonymous": True}
        made = running(folder, endpoints[0], **settings)
        client, service, _ = await stack.enter_async_context(made)
        async with asyncio.timeout(300):
            while not all(replica.ready for replica in service.replicas):
                await asyncio.sleep(0.01)
        yield client


async def test_a_broken_engine_is_not_where_an_answer_ends(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    engine = OneBreaksThenAnother(tokens=ids_of(tmp_path, TEXT), fault=None, step=0)
    engine.error = "[TensorRT-LLM][ERROR] CUDA runtime error: an illegal memory access"
    async with fleet(tmp_path, engine, 3) as client:
        body = {"model": "m", "prompt": "x", "max_tokens": 40, **GREEDY}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == TEXT
        assert len(engine.requests) == 3


async def test_a_request_that_kills_engines_at_any_token_has_few_of_them(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    engine = Poisoned(tokens=ids_of(tmp_path, TEXT), fault="abort", step=0)
    async with fleet(tmp_path, engine, 8, continuations=9) as client:
        body = {"model": "m", "prompt": "x", "max_tokens": 40}
        assert (await client.post("/v1/completions", json=body)).status_code == 503
        # The first, third and fifth request failed before their first token.
        assert len(engine.requests) == 5
