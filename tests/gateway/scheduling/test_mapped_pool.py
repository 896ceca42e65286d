"""Embedding models beside the chat model: choice of a replica, and failures of replicas."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer
from tests.support.lora_files import content
from tests.support.otlp_collector import collecting

MODELS: dict[str, Any] = {"e": {"input": "TEXT", "output": "OUT"}}
SERVER, CLIENT = 2, 3  # SpanKind in OTLP
ASKED = {"model": "e", "input": ["a", "b"]}


class Replica(FakeTriton):
    """A fake Triton with the chat model and, unless `lacks`, the embedding model `e`.

    All values of its vectors are `number`.
    """

    def __init__(self, number: float) -> None:
        super().__init__(tokens=[1], fault=None, step=0)
        self.number = number
        self.lacks = False
        self.fails: grpc.StatusCode | None = None
        self.says = "at /secret/place"
        self.batch = 8
        self.sizes: list[int] = []
        self.firsts: list[str] = []
        """First text of each call."""
        self.hold = asyncio.Event()
        self.hold.set()
        self.one_by_one: asyncio.Semaphore | None = None
        self.cancelled = 0

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        if request.name == "ids":
            config = model_config_pb2.ModelConfig(max_batch_size=self.batch)
            config.input.add(name="IDS", data_type="TYPE_INT32", dims=[-1])
            config.output.add(name="OUT", data_type="TYPE_FP32", dims=[2])
            return pb.ModelConfigResponse(config=config)
        if request.name != "e":
            return await super().ModelConfig(request, context)
        if self.lacks:
            text = "Request for unknown model: 'e' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        config = model_config_pb2.ModelConfig(name="e", max_batch_size=self.batch)
        config.input.add(name="TEXT", data_type="TYPE_STRING", dims=[1])
        config.output.add(name="OUT", data_type="TYPE_FP32", dims=[2])
        return pb.ModelConfigResponse(config=config)

    async def ModelInfer(self, request: Any, context: Any) -> pb.ModelInferResponse:
        rows = request.inputs[0].shape[0]
        self.sizes.append(rows)
        self.firsts.append(request.raw_input_contents[0][4:].decode(errors="replace"))
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            await self.hold.wait()
            if self.one_by_one is not None:
                await self.one_by_one.acquire()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails is not None:
            await context.abort(self.fails, self.says)
        response = pb.ModelInferResponse()
        response.outputs.add(name="OUT", datatype="FP32", shape=[rows, 2])
        values = np.full((rows, 2), self.number, np.float32)
        response.raw_output_contents.append(values.tobytes())
        return response


def configured(folder: Path, more: Mapping[str, Any] = MODELS) -> Path:
    save_tokenizer(folder)
    config = folder / "c.yaml"
    models = {**MODELS, **more}
    config.write_text(json.dumps({"anonymous": True, "embedding_models": models}))
    return config


@asynccontextmanager
async def gateway(
    folder: Path, *replicas: Replica, more: Mapping[str, Any] = MODELS, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """Start a gateway before the replicas, with the embedding models `more` besides `e`."""
    config = configured(folder, more)
    async with AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(serving(replica)) for replica in replicas]
        fields = {"config": config, "allow_anonymous": True} | settings
        client, service, _ = await stack.enter_async_context(
            running(folder, ",".join(endpoints), **fields)
        )
        await until(lambda: all(replica.ready for replica in service.replicas))
        yield client, service


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.01)


async def ask(client: httpx.AsyncClient, **more: Any) -> tuple[int, Any]:
    """Return the status, and the number of the replica that answered, or the error."""
    answer = await client.post("/v1/embeddings", json=ASKED | more)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]
    [number] = {row for each in answer.json()["data"] for row in each["embedding"]}
    return 200, number


async def chat(client: httpx.AsyncClient) -> int:
    asked = {"model": "m", "prompt": "a", "max_tokens": 1}
    return (await client.post("/v1/completions", json=asked)).status_code


async def test_a_replica_without_the_model_is_passed_by(tmp_path: Path) -> None:
    one, two = Replica(1), Replica(2)
    one.lacks = True
    async with gateway(tmp_path, one, two) as (client, _):
        assert [await ask(client) for _ in range(8)] == [(200, 2)] * 8
        two.lacks = True
    two.lacks = one.lacks = True
    async with gateway(tmp_path, one, two) as (client, _):
        status, error = await ask(client)
        assert (status, error["code"]) == (503, "engine_unavailable")
        assert await chat(client) == 200


async def test_a_replica_that_is_away_is_passed_by(tmp_path: Path) -> None:
    one, two = Replica(1), Replica(2)
    async with gateway(tmp_path, one, two) as (client, _):
        one.fails = grpc.StatusCode.UNAVAILABLE
        assert [await ask(client) for _ in range(12)] == [(200, 2)] * 12
        # After three failures the replica gets no embedding requests, but still gets chat requests.
        assert len(one.sizes) <= 3
        before = len(one.requests)
        await asyncio.gather(*[chat(client) for _ in range(20)])
        assert len(one.requests) > before


async def test_a_replica_that_is_silent_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Make the breaker's first pause longer than the test can take on a busy machine.
    monkeypatch.setattr("gateway.scheduling.breaker._FIRST_PAUSE_S", 1e6)
    clock = EventClock()
    one, two = Replica(1), Replica(2)
    one.hold.clear()
    statuses: Counter[int] = Counter()
    async with gateway(tmp_path, one, two, request_timeout=30) as (client, _):
        for _ in range(24):
            silent = partial(lambda asked: len(one.sizes) > asked, len(one.sizes))
            statuses[(await clock.leap_once(silent, ask(client), 31))[0]] += 1
        assert len(one.sizes) <= 3
        assert statuses[200] + statuses[504] == 24
        before = len(one.requests)
        await asyncio.gather(*[chat(client) for _ in range(20)])
        assert len(one.requests) > before


async def test_a_client_that_does_not_wait_says_nothing_of_a_replica(tmp_path: Path) -> None:
    clock = EventClock()
    one = Replica(1)
    one.hold.clear()
    hurried = {"x-request-timeout": "5"}
    async with gateway(tmp_path, one) as (client, _):
        for _ in range(5):
            asked = client.post("/v1/embeddings", json=ASKED, headers=hurried)
            silent = partial(lambda asked: len(one.sizes) > asked, len(one.sizes))
            assert (await clock.leap_once(silent, asked, 6)).status_code == 504
        one.hold.set()
        assert await ask(client) == (200, 1)


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize(
    "words",
    ["secret", "the word secret is not found", "secret: Stub process 'e_0_0' is not healthy."],
)
async def test_what_a_model_says_of_one_request_is_that_requests_own(
    tmp_path: Path, words: str, transport: str
) -> None:
    """An error that a model reports for a request does not count against the replica.

    The message may quote text of the request that looks like the failure of a process.
    """
    one = Replica(1)
    one.says = f"Failed to process the request(s) for model 'e_0_0', message: ValueError: {words}"
    async with gateway(tmp_path, one, triton_transport=transport) as (client, _):
        one.fails = grpc.StatusCode.INTERNAL
        for _ in range(5):
            status, error = await ask(client)
            assert status == 500
            assert "secret" not in error["message"]
        one.fails = None
        assert await ask(client) == (200, 1)


async def test_a_model_whose_process_has_died_is_passed_by(tmp_path: Path) -> None:
    one, two = Replica(1), Replica(2)
    one.fails = grpc.StatusCode.INTERNAL
    died = "Stub process 'e_0_0' is not healthy."
    async with gateway(tmp_path, one, two) as (client, _):
        one.says = died
        assert [await ask(client) for _ in range(4)] == [(200, 2)] * 4
        one.says = f"Failed to process the request(s) for model 'e_0_0', message: {died}"
        assert [await ask(client) for _ in range(4)] == [(200, 2)] * 4


async def test_a_model_that_takes_less_at_once_than_another_replicas(tmp_path: Path) -> None:
    one, two = Replica(1), Replica(2)
    one.batch = 3
    texts = [str(n) for n in range(20)]
    async with gateway(tmp_path, one, two) as (client, _):
        for _ in range(6):
            answer = await client.post("/v1/embeddings", json=ASKED | {"input": texts})
            assert [each["index"] for each in answer.json()["data"]] == list(range(20))
        assert max(one.sizes) == 3
        assert max(two.sizes) <= 8


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_one_request_has_four_calls_at_once_and_leaving_ends_them(
    tmp_path: Path, transport: str
) -> None:
    one = Replica(1)
    one.batch = 1
    one.hold.clear()
    texts = [str(n) for n in range(20)]
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with gateway(tmp_path, one, triton_transport=transport) as (client, service):
        asked = client.post(
            "/v1/embeddings", json=ASKED | {"input": texts}, headers={"traceparent": parent}
        )
        task = asyncio.create_task(asked)
        await until(lambda: len(one.sizes) == 4)
        for _ in range(20):
            await chat(client)
        assert len(one.sizes) == 4
        assert {call["traceparent"] for call in one.metadata if "traceparent" in call} == {parent}
        task.cancel()
        await until(lambda: one.cancelled == 4)
        assert service.mapped_pool.admission("e").in_flight == 0
        one.hold.set()
        assert await ask(client) == (200, 1)


async def test_a_call_is_traced(tmp_path: Path) -> None:
    one = Replica(1)
    with collecting() as collector:
        async with gateway(tmp_path, one, otlp_endpoint=collector.url) as (client, _):
            assert await ask(client) == (200, 1)
    [call] = [span for span in collector.spans if span.kind == CLIENT]
    [server] = [span for span in collector.spans if span.kind == SERVER]
    assert (server.name, call.parent_id) == ("POST /v1/embeddings", server.span_id)
    assert server.attributes["gen_ai.operation.name"] == "embeddings"
    assert call.attributes["rpc.method"] == "inference.GRPCInferenceService/ModelInfer"
    assert one.metadata[-1]["traceparent"].startswith(f"00-{server.trace_id}-{call.span_id}")


async def test_many_requests_share_the_calls_of_a_replica(tmp_path: Path) -> None:
    one = Replica(1)
    one.hold.clear()
    async with gateway(tmp_path, one) as (client, service):
        tasks = [asyncio.create_task(ask(client)) for _ in range(12)]
        await until(lambda: service.mapped_pool.admission("e").waiting == 4)
        await until(lambda: len(one.sizes) >= 8)
        assert len(one.sizes) == 8
        one.hold.set()
        assert await asyncio.gather(*tasks) == [(200, 1)] * 12


async def test_what_has_begun_goes_on_before_what_waits(tmp_path: Path) -> None:
    one = Replica(1)
    one.batch = 1
    one.one_by_one = asyncio.Semaphore(0)
    async with gateway(tmp_path, one) as (client, service):
        waiting = service.mapped_pool.admission("e")
        tasks = []
        for name in "ab":  # fill all slots of the replica
            texts = [f"{name}{n}" for n in range(6)]
            tasks.append(asyncio.create_task(ask(client, input=texts)))
            await until(lambda: len(one.firsts) == 4 * len(tasks))
        for name in "cd":
            tasks.append(asyncio.create_task(ask(client, input=[name])))
            await until(lambda: waiting.waiting == len(tasks) - 2)
        for calls in (9, 10):
            one.one_by_one.release()
            await until(partial(lambda calls: len(one.firsts) == calls, calls))
        # The first free slot goes to c, because a asks again only later. The next free slot goes to
        # a before d, because part of its texts is already embedded.
        assert one.firsts[8:] == ["c", "a4"]
        for _ in tasks * 6:
            one.one_by_one.release()
        assert await asyncio.gather(*tasks) == [(200, 1)] * 4


async def test_many_token_ids_take_their_turn(tmp_path: Path) -> None:
    """Checking 8 MB of token ids takes 0.1 s, so many ids wait for the text thread.

    A request with few ids does not wait.
    """
    ids = {"input_ids": "IDS", "output": "OUT", "tokenizer": str(tmp_path)}
    others = threading.Event()
    async with gateway(tmp_path, Replica(1), more={"ids": ids}) as (client, service):
        turns = service.prompts.threads
        busy = asyncio.create_task(turns.run("", 2**16, partial(others.wait, 60)))
        many = asyncio.create_task(ask(client, model="ids", input=[[1] * 2000] * 5))
        await until(lambda: turns.short.waiting_chars > 0)
        assert await ask(client, model="ids", input=[[1], [1]]) == (200, 1)
        assert not many.done()
        others.set()
        assert await many == (200, 1)
        await busy


async def test_a_reload_changes_the_models(tmp_path: Path) -> None:
    one = Replica(1)
    async with gateway(tmp_path, one) as (client, service):
        assert await ask(client) == (200, 1)
        config = tmp_path / "c.yaml"
        new = {"anonymous": True, "embedding_models": {"n": MODELS["e"] | {"triton_model": "e"}}}
        config.write_text(json.dumps(new))
        service.configuration.reload_now()
        await until(lambda: "n" in service.mapped)
        assert (await ask(client))[0] == 404
        assert await ask(client, model="n") == (200, 1)


async def test_a_triton_that_is_started_again_is_asked_anew(tmp_path: Path) -> None:
    """The gateway reads a model's maximum batch size again after a restart of Triton."""
    one, again = Replica(1), Replica(2)
    again.batch = 3
    texts = [str(n) for n in range(8)]
    async with AsyncExitStack() as stack:
        async with serving(one) as endpoint:
            config = configured(tmp_path)
            fields = {"config": config, "allow_anonymous": True}
            client, _, _ = await stack.enter_async_context(running(tmp_path, endpoint, **fields))
            assert await ask(client, input=texts) == (200, 1)
        status, error = await ask(client)
        assert (status, error["code"]) == (503, "engine_unavailable")
        await stack.enter_async_context(serving(again, endpoint))
        async with asyncio.timeout(300):
            while (answer := await ask(client, input=texts))[0] == 503:
                await asyncio.sleep(0.05)
        assert answer == (200, 2)
        assert max(again.sizes) == 3


async def test_no_adapter_gets_the_name_of_another_model(tmp_path: Path) -> None:
    key = "k" * 32
    async with gateway(tmp_path, Replica(1), admin_key=key) as (client, _):
        answer = await client.post(
            "/v1/adapters",
            json={"name": "e", "base": "m", "source": "https://127.0.0.1/e"},
            headers={"authorization": f"Bearer {key}"},
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "adapter_name_invalid"), error


async def test_an_adapter_that_a_model_hides_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(tmp_path, Replica(1)) as (client, service):
        # Add the adapter as another gateway would through Redis.
        await service.adapters.registry.add("e", "m", content(1), "test")
        await until(lambda: "adapter 'e' is hidden" in caplog.text)
        assert await ask(client) == (200, 1)
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["m", "e"]
