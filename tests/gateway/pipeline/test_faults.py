"""Engines that are late, silent or unavailable: deadlines, shutdown, keep-alives and logs."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from pathlib import Path

import httpx
import openai
import pytest

from gateway.config.file import Configuration
from gateway.deltas import TextDelta
from gateway.errors import RequestTimeout
from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.generation.options import GenerationParams, Options
from gateway.http.exchange import Exchange
from gateway.observability.logs import configure_logging
from gateway.observability.request_context import RequestContext
from gateway.pipeline.generate import generate
from gateway.pipeline.prepare import prepare
from gateway.scheduling import replicas
from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer
from tests.support.patience import PATIENCE_S

TEXT = "hello"
_OF_A_REQUEST = (Exchange, RequestContext, Batch, Generation)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    return tmp_path


@pytest.fixture(params=["http2", "grpcio"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_TRITON_TRANSPORT", request.param)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("stream", [True, False])
async def test_the_deadline_ends_several_choices_too(tokenizer_dir: Path, stream: bool) -> None:
    clock = EventClock()
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault="stall", step=2)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, service, _),
    ):
        body = {"model": "m", "prompt": "x", "stream": stream, "n": 3}
        asked = client.post("/v1/completions", json=body, timeout=None)
        response = await clock.leap_once(lambda: servicer.reached == 3, asked)
        assert '"code":"timeout"' in response.text
        assert response.status_code == (200 if stream else 504)
        assert metric_of(service, "gateway_generations_in_flight") == 0


class Slow:
    """A sink that pauses after each delta. An hour of `clock` passes after the text `late`."""

    def __init__(self, clock: EventClock | None = None, late: str = "") -> None:
        self.deltas: list[TextDelta] = []
        self._clock, self._late = clock, late

    def accept(self, index: int, delta: TextDelta) -> bool:
        self.deltas.append(delta)
        return False

    async def drain(self, by: float | None = None) -> None:
        if self._clock is not None and self.text == self._late:
            self._clock.leap(3600)
        await asyncio.sleep(0.7)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


async def test_the_deadline_finds_a_consumer_that_is_slow(tokenizer_dir: Path) -> None:
    """The deadline ends the request, but does not interrupt the consumer's current pause."""
    sink = Slow(EventClock(), late=TEXT[:4])
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault="stall", step=4)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (_, service, _),
    ):
        batch = await prepare(service, ["x"], Options(seed=1), chat=False)
        with pytest.raises(RequestTimeout):
            await generate(service, RequestContext("test"), batch, sink)
        # Tokens that arrived while the consumer was busy were delivered, too.
        assert sink.text == TEXT[:4]
        assert metric_of(service, "gateway_stops_total", reason="timeout") == 1


class Untaken(Slow):
    """A sink whose client does not read the end of the answer before the deadline."""

    async def drain(self, by: float | None = None) -> None:
        if self.deltas and self.deltas[-1].finish is not None:
            assert self._clock is not None
            self._clock.leap(3600)
            async with asyncio.timeout_at(by):
                await asyncio.Event().wait()


async def test_a_whole_answer_that_is_not_taken_in_time_is_not_late(tokenizer_dir: Path) -> None:
    sink = Untaken(EventClock())
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (_, service, _),
    ):
        batch = await prepare(service, ["x"], Options(seed=1), chat=False)
        await generate(service, RequestContext("test"), batch, sink)
        assert sink.text == TEXT
        assert not service.admission.in_flight
    assert servicer.stopped == []


async def test_what_comes_with_the_end_of_a_stop_string_is_dropped(tokenizer_dir: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    sink = Slow()
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (_, service, _),
    ):
        options = Options(seed=1, params=GenerationParams(stop=("el",)))
        batch = await prepare(service, ["x"], options, chat=False)
        await generate(service, RequestContext("test"), batch, sink)
    assert sink.text == "h"
    assert [delta.finish for delta in sink.deltas] == [None, "stop"]


async def test_every_log_line_names_its_request(
    tokenizer_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault="error", step=0)
    servicer.error = "[TensorRT-LLM][ERROR] Assertion failed: secret (/src/file.cpp:1)"
    async with serving(servicer) as endpoint, running(tokenizer_dir, endpoint) as (client, _, _):
        configure_logging("info")
        headers = {"x-request-id": "mine-1"}
        body = {"model": "m", "prompt": "never logged"}
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 500
        assert "secret" not in response.text
        logging.getLogger().handlers.clear()
    lines = [line for line in capfd.readouterr().err.splitlines() if "gateway." in line]
    assert len(lines) == 2, lines
    assert all("[mine-1]" in line for line in lines)
    assert "never logged" not in "".join(lines)


@pytest.mark.usefixtures("transport")
async def test_no_fault_no_stop(tokenizer_dir: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with serving(servicer) as endpoint, running(tokenizer_dir, endpoint) as (client, _, _):
        response = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert response.json()["choices"][0] == {
            "index": 0,
            "text": TEXT,
            "logprobs": None,
            "finish_reason": "stop",
        }
    assert servicer.stopped == []


@pytest.mark.usefixtures("transport")
async def test_new_requests_wait_a_moment_for_a_replica_that_was_just_lost(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed poll may be a brief outage, so requests wait for the next polls."""
    monkeypatch.setattr(replicas, "_RECOVERY_WAIT_S", PATIENCE_S)
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, service, _),
    ):
        body = {"model": "m", "prompt": "x"}
        [replica] = service.replicas
        servicer.deaf = True
        while not servicer.unanswered:  # a poll that began earlier would succeed
            await asyncio.sleep(0.01)
        replica.engine._mark_lost("one look failed")
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
        while servicer.unanswered < 2:  # the next poll fails, too
            assert not any(task.done() for task in asked)
            await asyncio.sleep(0.01)
        servicer.deaf = False
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 3
        # Requests do not wait for a replica that has been lost for longer.
        servicer.deaf = True
        replica.engine._mark_lost("one look failed")
        replica.engine.lost_at -= PATIENCE_S
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        servicer.deaf = False


@pytest.mark.usefixtures("transport")
async def test_triton_away_and_back(tokenizer_dir: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with serving(servicer) as endpoint:
        pass
    async with running(tokenizer_dir, endpoint, ready=False) as (client, _, _):
        body = {"model": "m", "prompt": "x"}
        away = await client.post("/v1/completions", json=body)
        assert away.status_code == 503
        assert away.json()["error"]["code"] == "engine_unavailable"
        assert away.headers["retry-after"] == "2"
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
        async with serving(servicer, endpoint), asyncio.timeout(300):
            while (await client.get("/health/ready")).status_code != 200:
                await asyncio.sleep(0.05)
            assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("stream", [True, False])
async def test_shutdown_stops_what_outlives_the_grace(tokenizer_dir: Path, stream: bool) -> None:
    clock = EventClock()
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault="stall", step=2)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, shutdown_grace=120) as (client, service, server),
    ):
        body = {"model": "m", "prompt": "x", "stream": stream}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, timeout=240))
        while not servicer.reached:
            await asyncio.sleep(0.01)
        server.should_exit = True
        response = await clock.leap_once(lambda: service.replicas.draining, asking, 180)
        assert response.status_code == (200 if stream else 503)
        assert '"code":"shutting_down"' in response.text
        assert response.text.endswith("data: [DONE]\n\n") is stream
        async with asyncio.timeout(300):
            while not servicer.stopped:
                await asyncio.sleep(0.01)
        assert metric_of(service, "gateway_stops_total", reason="shutdown") == 1


async def test_a_request_on_its_way_when_the_server_ends_is_answered(tokenizer_dir: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, service, server),
    ):
        assert (await client.get("/health/live")).status_code == 200
        server.should_exit = True
        while not service.replicas.draining:
            await asyncio.sleep(0)
        # This request uses a connection that was idle when the server closed its idle connections.
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == TEXT
        assert answer.headers["connection"] == "close"
        with pytest.raises(httpx.ConnectError):
            await client.get("/health/live")


async def test_a_mistake_in_the_background_ends_the_server(
    tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server must not continue unnoticed with an outdated configuration."""
    config = write_config(tokenizer_dir / "c.yaml", tenant("acme", "sk-acme-key"))
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, config=config) as (_, service, server),
    ):
        first = service.configuration.current

        def fails(configuration: Configuration) -> None:
            assert configuration is first

        service.configuration.subscribe(fails)
        service.configuration.reload_now()
        async with asyncio.timeout(300):
            while not server.should_exit:
                await asyncio.sleep(0.01)
    assert server.exit_code == 1
    assert "the gateway cannot continue" in caplog.text


@pytest.mark.parametrize("n", [1, 3])
async def test_a_slow_first_token_keeps_the_line_and_the_decoder(
    tokenizer_dir: Path, n: int
) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault="slow", step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, keep_alive=0.1) as (client, _, _),
    ):
        body = {"model": "m", "prompt": "x", "stream": True, "n": n}
        data = b""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_bytes():
                data += piece
                if data.count(b": keep-alive") == 3:
                    servicer.released.set()
        kept, _, rest = data.decode().partition("data: ")
        assert set(kept.split("\n\n")) == {": keep-alive", ""}
        assert TEXT[0] in rest
        assert ": keep-alive" not in rest
        servicer.released.clear()
        asyncio.get_running_loop().call_later(0.3, servicer.released.set)
        api = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x", timeout=PATIENCE_S)
        async with api:
            stream = await api.completions.create(model="m", prompt="x", stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == TEXT


@pytest.mark.parametrize("n", [1, 3])
async def test_a_first_token_without_text_sends_nothing(tokenizer_dir: Path, n: int) -> None:
    """Half a character makes no SSE event. Headers are sent with the first event that has text."""
    text = "\u00e9x"
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, text), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint) as (client, _, _),
    ):
        body = {"model": "m", "prompt": "x", "stream": True, "n": n}
        response = await client.post("/v1/completions", json=body)
        events = [json.loads(e[6:]) for e in response.text.split("\n\n")[:-2]]
        choices = [event["choices"][0] for event in events]
        for index in range(n):
            assert "".join(c["text"] for c in choices if c["index"] == index) == text


async def test_who_follows_a_response_is_kept_waiting_with_comments(tokenizer_dir: Path) -> None:
    """Keep-alive comments are sent while the followed response has no new events."""
    words = {"eos_token": "!", "chat_template": "{{ messages[0].content }}"}
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps(words))
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault="slow", step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, keep_alive=0.1) as (client, _, _),
    ):
        asked = {"model": "m", "input": "x", "background": True, "stream": True}
        data = b""
        async with client.stream("POST", "/v1/responses", json=asked) as response:
            async for piece in response.aiter_bytes():
                data += piece
                if data.partition(b"event: ")[2].count(b": keep-alive") == 2:
                    servicer.released.set()
        # On a busy machine, another comment may come before the stream is closed.
        assert (
            b"event: response.completed"
            in data.partition(b"event: ")[2].split(b": keep-alive", 2)[2]
        )


async def test_an_error_after_keep_alives_is_a_frame(tokenizer_dir: Path) -> None:
    clock = EventClock()
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault="stall", step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, keep_alive=0.1) as (client, _, _),
    ):
        body = {"model": "m", "prompt": "x", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, timeout=None) as response:
            clock.leap(3600)  # the headers came with a keep-alive
            text = (await response.aread()).decode()
        assert response.status_code == 200
        assert '"code":"timeout"' in text
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("origins", [[], ["https://app.example"]])
async def test_cors_is_off_unless_set(tokenizer_dir: Path, origins: list[str]) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tokenizer_dir, endpoint, cors_origins=origins) as (client, _, _),
    ):
        headers = {
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        }
        preflight = await client.options("/v1/completions", headers=headers)
        answer = await client.get("/v1/models", headers=headers)
        body = {"model": "m", "prompt": "x", "stream": True}
        generated = await client.post("/v1/completions", headers=headers, json=body)
        assert generated.status_code == 200
        assert ("access-control-allow-origin" in generated.headers) is bool(origins)
        if origins:
            assert preflight.status_code == 200
            assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert ("access-control-allow-origin" in answer.headers) is bool(origins)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.slow
async def test_an_answered_request_waits_for_no_collector(
    tokenizer_dir: Path, stream: bool
) -> None:
    servicer = FakeTriton(tokens=ids_of(tokenizer_dir, TEXT), fault=None, step=0)
    async with serving(servicer) as endpoint, running(tokenizer_dir, endpoint) as (client, _, _):
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                body = {"model": "m", "prompt": "x", "stream": stream}
                await client.post("/v1/completions", json=body)
            # A connection references its last request until the next one, so send one more request.
            await client.get("/health/live")
            gc.collect()
            cyclic = [type(found) for found in gc.garbage if isinstance(found, _OF_A_REQUEST)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert cyclic == []
