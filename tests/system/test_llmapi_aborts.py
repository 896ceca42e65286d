"""A request of the llmapi repository that is abandoned in any phase ends once and frees the engine.

The model polls for cancelled calls once an hour here, so the gateway's stop request must do it.
`python -m bench.llmapi_abort` measures the delay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.event_clock import EventClock
from tests.support.in_process import metric_of, running
from tests.support.llmapi_models import ENDLESS, RELEASES, build_inputs, build_synthetic
from tests.support.triton_server import MODEL, Server, serving
from triton_repo.llmapi_repository import render_llmapi

_WITHIN_S = 300.0
_SHORT = 8
# Phase: max_tokens, and the number of tokens that the client has received when it disconnects.
PHASES = {
    "queued": (ENDLESS, 0),
    "before the first token": (ENDLESS, 0),
    "at the first token": (ENDLESS, 1),
    "in the middle": (ENDLESS, 5),
    "at the last token": (_SHORT, _SHORT - 1),
}
STOPS = {" one": ENDLESS, "one one one o": ENDLESS, "one one one one": 4}
HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("aborts")
    engine = str(build_synthetic(folder / "synthetic"))
    for model, release in RELEASES.items():
        parameters = {"model": engine, "behaves_as": release}
        seldom = {"cancellation_check_period_ms": HOUR_MS}
        render_llmapi(folder / "repository", parameters | seldom, model=model)
    with serving(folder) as server:
        yield server


class Requests:
    """Requests to one gateway. `count` is the number of requests so far."""

    def __init__(self, client: httpx.AsyncClient, service: Any) -> None:
        self._client = client
        self._service = service
        self.count = 0
        self.text = ""
        """Text of the latest request, as far as it has arrived."""

    async def ask(self, tokens: int, stop: str | None = None, **headers: str) -> str:
        self.count += 1
        self.text = ""
        body = {"model": "m", "prompt": "x", "max_tokens": tokens, "stop": stop, "stream": True}
        path = "/v1/completions"
        async with self._client.stream("POST", path, json=body, headers=headers) as response:
            async for piece in response.aiter_text():
                self.text += piece
        return self.text

    def under_way(self, seen: int) -> Callable[[], bool]:
        """Return a check: the latest request runs, and its client has received `seen` tokens."""
        return lambda: self.in_flight == 1 and self.text.count(" one") >= seen

    @property
    def in_flight(self) -> float:
        return metric_of(self._service, "gateway_generations_in_flight")

    @property
    def ends(self) -> float:
        [family] = [
            each
            for each in self._service.metrics.registry.collect()
            if each.name == "gateway_requests"
        ]
        return sum(
            sample.value
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels["path"] == "/v1/completions"
        )


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not met():
            await asyncio.sleep(0.01)


async def leave(request: Coroutine[Any, Any, str], is_there: Callable[[], bool]) -> None:
    victim = asyncio.create_task(request)
    await until(lambda: is_there() or victim.done())
    victim.cancel()
    await asyncio.gather(victim, return_exceptions=True)


async def serves_the_next(triton: Server, model: str) -> None:
    """Check that the engine is free. Its only slot would still run an `ENDLESS` answer."""
    one = build_inputs(
        "x", sampling_param_max_tokens=1, sampling_param_exclude_input_from_output=True
    )
    [reply] = await asyncio.to_thread(triton.ask, one, model)
    assert reply.outputs["text_output"][0] == b" one"


@pytest.mark.parametrize("model", RELEASES)
async def test_each_ends_once_and_frees_the_engine(
    triton: Server, tmp_path: Path, model: str
) -> None:
    clock = EventClock()
    streams = model != "like_1_2"
    fields = {"triton_model": model, "max_seq_len": 2 * ENDLESS, "replica_in_flight": 2}
    usage = tmp_path / "usage.jsonl"
    async with running(tmp_path, triton.grpc, tokenizer_dir=MODEL, usage_log=usage, **fields) as (
        client,
        service,
        _,
    ):
        requests = Requests(client, service)
        for phase, (tokens, seen) in PHASES.items():
            # Release 1.2 sends all tokens at the end, so its client sees none before.
            is_there = requests.under_way(seen if streams else 0)
            for how in ("disconnect", "deadline"):
                with contextlib.ExitStack() as stack:
                    if phase == "queued":
                        blocker = stack.enter_context(triton.stream())
                        block = build_inputs("x", sampling_param_max_tokens=ENDLESS, streaming=True)
                        blocker.send(block, model, request_id="blocker")
                        if streams:
                            await asyncio.to_thread(blocker.next)
                    if how == "disconnect":
                        await leave(requests.ask(tokens), is_there)
                    else:
                        ask = requests.ask(tokens, **{"x-request-timeout": "8"})
                        text = await clock.leap_once(is_there, ask, 8)
                        timeouts = text.count('"code":"timeout"')
                        assert timeouts + text.count('"finish_reason":"length"') == 1, (phase, text)
                        assert timeouts or tokens == _SHORT
                    await until(lambda: requests.in_flight == 0)
                    if phase == "queued":
                        blocker.send(build_inputs("", stop=True), model, request_id="blocker")
                        await serves_the_next(triton, model)
                await serves_the_next(triton, model)
        for stop, tokens in STOPS.items() if streams else ():
            text = await requests.ask(tokens, stop)
            assert text.count('"finish_reason":"stop"') == 1, (stop, text)
            await serves_the_next(triton, model)
        await until(lambda: requests.ends == requests.count)
        assert requests.in_flight == 0
        [replica] = service.replicas
        assert (replica.in_flight, replica.state) == (0, "ready")
    # When the gateway has closed, all late ends are counted and written.
    assert requests.ends == requests.count
    assert len(usage.read_text().splitlines()) == requests.count
