"""The llmapi repository in a real Triton, through the gateway, beside the old repository."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.event_clock import EventClock
from tests.support.in_process import metric_of, running
from tests.support.llmapi_models import ENDLESS, RELEASES, build_inputs, render_releases
from tests.support.triton_server import MODEL, Server, render_core, serving
from triton_repo.cpu_executor import engine
from triton_repo.llmapi_repository import render_llmapi

_WITHIN_S = 300.0
QUESTIONS = (
    *("What is the capital of France?", "What is the capital of Japan?", "Hello!"),
    *("Count from 1 to 30", "What is 2 + 2?", "Say something in Japanese", "Who are you?"),
)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("llmapi")
    engine.build(MODEL, folder / "engine")
    render_core(folder)
    repository = folder / "repository"
    render_llmapi(repository, {"model": str(MODEL)}, model="real")
    render_releases(repository, folder / "synthetic")
    with serving(folder) as server:
        yield server


class Gateway:
    """A gateway for one model. `service` is the gateway's application object."""

    def __init__(self, client: httpx.AsyncClient, service: Any) -> None:
        self.client = client
        self.service = service

    async def chat(self, question: str, **body: Any) -> dict[str, Any]:
        """Return the text, the finish reason and the usage of an answer, streamed or not."""
        told = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
        messages = [{"role": "user", "content": question}]
        asked = {"model": "m", "messages": messages, "temperature": 0} | told | body
        response = await self.client.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            answer = response.json()
            [choice] = answer["choices"]
            text = choice["message"]["content"]
            return {"text": text, "finish": choice["finish_reason"], "usage": answer["usage"]}
        chunks = frames(response.text)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        [finish] = [each["finish_reason"] for each in choices if each["finish_reason"]]
        pieces = [each["delta"].get("content") or "" for each in choices]
        return {"text": "".join(pieces), "finish": finish, "usage": chunks[-1]["usage"]}

    def endless(self, *, stream: bool, **headers: str) -> Any:
        body = {"model": "m", "prompt": "x", "max_tokens": ENDLESS, "stream": stream}
        return self.client.stream("POST", "/v1/completions", json=body, headers=headers)

    def stops(self, reason: str) -> float:
        return metric_of(self.service, "gateway_stops_total", reason=reason)

    @property
    def in_flight(self) -> float:
        return metric_of(self.service, "gateway_generations_in_flight")


def frames(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1] if not line.startswith(":")]


@contextlib.asynccontextmanager
async def gateway(triton: Server, folder: Path, model: str, **more: Any) -> AsyncIterator[Gateway]:
    fields = {"tokenizer_dir": MODEL, "triton_model": model} | more
    async with running(folder, triton.grpc, **fields) as (client, service, _):
        yield Gateway(client, service)


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not met():
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_fifty_chats_at_once_are_those_of_the_old_repository(
    triton: Server, tmp_path: Path
) -> None:
    async with gateway(triton, tmp_path, "tensorrt_llm", max_seq_len=None) as old:
        limit = old.service.replicas.capabilities[0].max_seq_len
        expected = await asyncio.gather(*[old.chat(question) for question in QUESTIONS])
    async with gateway(triton, tmp_path, "real", max_seq_len=limit) as found:
        whole = await asyncio.gather(*[found.chat(question) for question in QUESTIONS])
        streamed = await asyncio.gather(
            *[found.chat(QUESTIONS[n % len(QUESTIONS)], stream=True) for n in range(50)]
        )
    for answers in (*expected, *whole, *streamed):
        answers["usage"].pop("prompt_tokens_details")
    assert whole == expected
    assert streamed == [expected[n % len(QUESTIONS)] for n in range(50)]


async def serves_the_next(triton: Server, model: str) -> None:
    """Check that the engine is free. Its only slot would still run an `ENDLESS` answer."""
    ask = build_inputs(
        "x", sampling_param_max_tokens=1, sampling_param_exclude_input_from_output=True
    )
    [reply] = await asyncio.to_thread(triton.ask, ask, model)
    assert reply.outputs["text_output"][0] == b" one"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("queued", [False, True], ids=["running", "queued"])
@pytest.mark.parametrize("model", RELEASES)
async def test_however_a_request_is_left_the_engine_is_free(
    triton: Server, tmp_path: Path, model: str, queued: bool, stream: bool
) -> None:
    """Check a disconnect and a deadline, before and after the first token."""
    begins = stream and not queued and model != "like_1_2"
    clock = EventClock()
    limits = {"max_seq_len": 2 * ENDLESS, "replica_in_flight": 2}
    async with gateway(triton, tmp_path, model, **limits) as found:
        for reason, headers in (("disconnect", {}), ("timeout", {"x-request-timeout": "8"})):
            with contextlib.ExitStack() as stack:
                if queued:
                    blocker = stack.enter_context(triton.stream())
                    more = {"sampling_param_max_tokens": ENDLESS, "streaming": True}
                    blocker.send(build_inputs("x", **more), model, request_id="blocker")
                    if model != "like_1_2":
                        await asyncio.to_thread(blocker.next)
                await left(found, clock, reason, headers, begins=begins, stream=stream)
                await until(lambda: found.in_flight == 0)
                assert found.stops(reason) == 1
            await serves_the_next(triton, model)
        assert found.stops("disconnect") == 1
        [replica] = found.service.replicas
        assert replica.in_flight == 0
        assert replica.state == "ready"


async def left(
    found: Gateway,
    clock: EventClock,
    reason: str,
    headers: dict[str, str],
    *,
    begins: bool,
    stream: bool,
) -> None:
    began = asyncio.Event()

    async def ask() -> str:
        text = ""
        async with found.endless(stream=stream, **headers) as response:
            async for piece in response.aiter_text():
                text += piece
                if "data: " in text:  # a comment that keeps the connection alive does not count
                    began.set()
        return text

    def is_under_way() -> bool:
        return began.is_set() if begins else found.in_flight == 1

    request = asyncio.create_task(ask())
    if reason == "disconnect":
        await until(is_under_way)
        request.cancel()
        return
    text = await clock.leap_once(is_under_way, request, 8)
    assert text.count('"code":"timeout"') == 1
    assert '"finish_reason":"' not in text


@pytest.mark.parametrize("model", RELEASES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_an_answer_and_the_engine(
    triton: Server, tmp_path: Path, model: str, stream: bool
) -> None:
    # Release 1.2 sends its tokens only at the end, so its answer must be short.
    tokens = 40 if model == "like_1_2" else ENDLESS
    async with gateway(triton, tmp_path, model, max_seq_len=2 * ENDLESS) as found:
        answer = await found.chat("x", stream=stream, stop="one one one o", max_tokens=tokens)
        assert (answer["text"], answer["finish"]) == (" ", "stop")
        assert answer["usage"]["completion_tokens"] == 4
        await serves_the_next(triton, model)
        assert found.stops("stop_string") == (model != "like_1_2")
