"""Stops that arrive before the engine knows the request.

An ensemble may still tokenize the prompt at that time. The engine answers such a stop and forgets
it, so the gateway has to repeat it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import metric_of, running, save_tokenizer

HANGS_AFTER_S = 300
INPUTS = {
    "STRING": ("text_input",),
    "INT32": ("max_tokens", "top_k"),
    "FP32": ("top_p",),
    "BOOL": ("stream",),
}
STEPS = {"preprocessing": "QUERY", "tensorrt_llm": "input_ids", "postprocessing": "TOKENS_BATCH"}


class Core(FakeTriton):
    """A fake engine that generates until it is stopped, and ignores the first `forgets` stops."""

    mode = "token"

    def __init__(self, forgets: int) -> None:
        super().__init__(tokens=[65], fault="stall", step=0)
        self.forgets = forgets


class Ensemble(Core):
    """A fake ensemble over such an engine, with a step that a stream reset does not end."""

    mode = "text"

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        answer = await super().ModelConfig(request, context)
        if request.name == "ensemble":
            answer.config.platform = "ensemble"
            for datatype, names in INPUTS.items():
                for name in names:
                    answer.config.input.add(name=name, data_type=f"TYPE_{datatype}")
            for model, tensor in STEPS.items():
                step = answer.config.ensemble_scheduling.step.add(model_name=model)
                step.input_map[tensor] = tensor
        return answer

    def left(self, request_id: str, ends: asyncio.Event) -> None:
        """Do nothing: the step continues to run."""


async def until(happened: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANGS_AFTER_S):
        while not happened():
            await asyncio.sleep(0.01)


async def leave(client: Any, engine: FakeTriton) -> None:
    """Send a request, and disconnect as soon as the engine runs it."""
    body = {"model": "m", "prompt": "x", "stream": True}
    asking = asyncio.create_task(client.post("/v1/completions", json=body))
    await until(lambda: engine.running or asking.done())
    assert asking.cancel(), "it was refused"


@pytest.mark.parametrize("kind", [Core, Ensemble])
async def test_a_stop_that_came_too_early_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Core]
) -> None:
    """A stop is repeated up to three times.

    By then a stream reset has also ended a request, unless the model is an ensemble.
    """
    monkeypatch.setattr("gateway.triton.http2.connection.ABANDON_GRACE_S", HANGS_AFTER_S)
    save_tokenizer(tmp_path)
    engine = kind(forgets=3)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, triton_mode=engine.mode) as (client, service, _),
    ):
        await leave(client, engine)
        await until(lambda: not engine.running)
        await until(lambda: metric_of(service, "gateway_stop_seconds_count", reason="disconnect"))
        assert metric_of(service, "gateway_stops_total", reason="disconnect") == 1
    assert engine.stops == [engine.requests[0].id] * 4


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_a_step_that_outlives_the_reset_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setenv("GATEWAY_TRITON_TRANSPORT", transport)
    monkeypatch.setattr("gateway.triton.http2.connection.ABANDON_GRACE_S", 0.0)
    save_tokenizer(tmp_path)
    engine = Ensemble(forgets=1)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, triton_mode="text") as (client, service, _),
    ):
        await leave(client, engine)
        await until(lambda: not engine.running)
        assert metric_of(service, "gateway_stops_unseen_total", reason="disconnect") == 1
    assert engine.stops == [engine.requests[0].id] * 2


@pytest.mark.parametrize("kind", [Core, Ensemble])
async def test_what_ends_at_once_is_told_once(tmp_path: Path, kind: type[Core]) -> None:
    clock = EventClock()
    save_tokenizer(tmp_path)
    engine = kind(forgets=0)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, triton_mode=engine.mode) as (client, service, _),
    ):
        with clock.standing():
            asking = asyncio.create_task(
                client.post("/v1/completions", json={"model": "m", "prompt": "x"})
            )
            while not (engine.running or asking.done()):
                await asyncio.sleep(0)
            assert asking.cancel(), "it was refused"
            while not metric_of(service, "gateway_stop_seconds_count", reason="disconnect"):
                await asyncio.sleep(0)
        clock.leap(10)
    assert engine.stops == [engine.requests[0].id]
