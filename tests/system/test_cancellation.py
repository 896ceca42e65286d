"""A client that goes away frees the engine at once, whatever the request was doing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.support.local_stack import Stack
from tests.support.metrics import metric

pytestmark = [
    pytest.mark.timed,
    pytest.mark.token_mode_only(
        "requests inside a BLS model have ids of their own: they are cancelled, not stopped by id",
        of=["bls"],
    ),
]

# The engine's counters are refreshed every 100 ms; 300 ms is what the disconnect may take in all.
STOPPED_WITHIN_S = 0.3
IDLE_WITHIN_S = 10.0  # at the latest, on a machine that is busy with other things
COUNT = "Count from 1 to 300"


def _active(stack: Stack) -> float:
    return metric(
        stack.triton_metrics,
        "nv_trt_llm_request_metrics",
        model="tensorrt_llm",
        request_type="active",
    )


def _stops(stack: Stack, reason: str) -> float:
    return metric(stack.gateway + "/metrics", "gateway_stops_total", reason=reason)


def _in_flight(stack: Stack) -> float:
    return metric(stack.gateway + "/metrics", "gateway_generations_in_flight")


def _waiting(stack: Stack) -> float:
    return metric(stack.gateway + "/metrics", "gateway_requests_waiting")


def _wait_until_idle(stack: Stack) -> float:
    """Seconds until the engine reports no active request."""
    started = time.monotonic()
    while _active(stack) > 0:
        assert time.monotonic() - started < IDLE_WITHIN_S, "the engine is still generating"
        time.sleep(0.02)
    return time.monotonic() - started


def _wait_until_busy(stack: Stack) -> None:
    deadline = time.monotonic() + IDLE_WITHIN_S
    while _active(stack) == 0:
        assert time.monotonic() < deadline, "the engine reports no request"
        time.sleep(0.01)


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + IDLE_WITHIN_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "not within the time"
        await asyncio.sleep(0.05)


def _body(*, stream: bool, tokens: int = 2000) -> dict[str, object]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": COUNT}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }


def _seconds_to_idle(stack: Stack, leave: Callable[[], None]) -> float:
    """From a client's leaving to the engine's own report that nothing runs; the least of five.

    A busy machine delays the client, the metrics page and the test itself.
    """
    times = []
    for _ in range(5):
        leave()
        times.append(_wait_until_idle(stack))
    return min(times)


def test_while_streaming(stack: Stack) -> None:
    before = _stops(stack, "disconnect")

    def leave() -> None:
        url = stack.gateway + "/v1/chat/completions"
        with httpx.stream("POST", url, json=_body(stream=True)) as response:
            lines = response.iter_lines()
            for _ in range(20):
                next(lines)
            _wait_until_busy(stack)

    assert _seconds_to_idle(stack, leave) <= STOPPED_WITHIN_S
    assert _stops(stack, "disconnect") == before + 5


def test_a_request_that_does_not_stream(stack: Stack) -> None:
    before = _stops(stack, "disconnect")

    def leave() -> None:
        url = stack.gateway + "/v1/chat/completions"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=_body(stream=False), timeout=0.25)

    assert _seconds_to_idle(stack, leave) <= STOPPED_WITHIN_S
    assert _stops(stack, "disconnect") == before + 5


async def test_while_queued_and_before_the_first_token(stack: Stack) -> None:
    """More requests than the engine has slots, all abandoned before most have begun."""
    before = _stops(stack, "disconnect")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        tasks = [
            asyncio.create_task(
                client.post(stack.gateway + "/v1/chat/completions", json=_body(stream=n % 2 == 0))
            )
            for n in range(100)
        ]
        await _until(lambda: _in_flight(stack) + _waiting(stack) == len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(_wait_until_idle, stack)
    await _until(lambda: _in_flight(stack) == 0)
    assert _stops(stack, "disconnect") - before == sum(task.cancelled() for task in tasks)


def test_a_stop_string_stops_the_engine(stack: Stack) -> None:
    before = _stops(stack, "stop_string")
    # Tokenized alone it has other ids than in "9, 10", so the engine cannot stop by itself.
    body = _body(stream=False) | {"stop": [" 1"]}

    def ask() -> None:
        answer = httpx.post(stack.gateway + "/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5, 6, 7, 8, 9,"

    assert _seconds_to_idle(stack, ask) <= STOPPED_WITHIN_S
    assert _stops(stack, "stop_string") == before + 5


async def test_a_hundred_clients_that_leave_at_random(stack: Stack) -> None:
    gateway = psutil.Process(stack.pids["gateway"])

    async def leave_after(client: httpx.AsyncClient, seconds: float, stream: bool) -> None:
        request = client.post(stack.gateway + "/v1/chat/completions", json=_body(stream=stream))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await request

    async def round_of(clients: int, seed: int) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
            async with asyncio.TaskGroup() as group:
                for n in range(clients):
                    group.create_task(leave_after(client, rng.uniform(0.01, 1.0), n % 2 == 0))

    await round_of(50, 0)  # warm: pools, caches and compiled code come to their size
    await asyncio.to_thread(_wait_until_idle, stack)
    rss, files = gateway.memory_info().rss, gateway.num_fds()
    await round_of(100, 1)
    await asyncio.to_thread(_wait_until_idle, stack)
    await _until(lambda: _in_flight(stack) == 0)
    await _until(lambda: gateway.num_fds() <= files + 2)
    assert gateway.memory_info().rss - rss < 16 * 1024 * 1024
    body = _body(stream=False) | {"max_tokens": 5}
    answer = httpx.post(stack.gateway + "/v1/chat/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 5
