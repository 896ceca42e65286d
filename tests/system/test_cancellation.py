"""A client that disconnects frees the engine at once, in every phase of its request."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.support.cpu import cpu_seconds
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.patience import PATIENCE_S
from tests.support.triton_server import LONG_ANSWER

pytestmark = [
    pytest.mark.token_mode_only(
        "requests inside a BLS model have ids of their own: they are cancelled, not stopped by id",
        of=["bls"],
    ),
    pytest.mark.token_mode_only(
        "llmapi has no metrics of its engine: tests/system/test_llmapi.py asks for the next token",
        of=["llmapi", "llmapi-1.3", "llmapi-1.2"],
    ),
]

# The limit is CPU time of the engine's process, because a busy machine slows the engine as much as
# the gateway. 300 ms includes the engine's counters, which are refreshed every 100 ms.
STOPPED_WITHIN_CPU_S = 0.3
ROUNDS = 5
IDLE_WITHIN_S = 300.0  # a longer wait means that something hangs
COUNT = "Count from 1 to 300"
# Shorter answers for many concurrent clients: each request takes longer in a full batch.
OF_A_CROWD = LONG_ANSWER // 4


@pytest.fixture
def stack(long_stack: Stack) -> Stack:
    """Return the stack with answers that outlast their clients, even if a process is stopped a
    while.
    """
    return long_stack


def _engine(stack: Stack, family: str, **labels: str) -> float:
    return metric(stack.triton_metrics, f"nv_trt_llm_{family}", model="tensorrt_llm", **labels)


def _active(stack: Stack) -> float:
    return _engine(stack, "request_metrics", request_type="active")


def _steps(stack: Stack) -> float:
    return _engine(stack, "general_metrics", general_type="iteration_counter")


def _stops(stack: Stack, reason: str) -> float:
    return metric(stack.gateway + "/metrics", "gateway_stops_total", reason=reason)


def _in_flight(stack: Stack) -> float:
    return metric(stack.gateway + "/metrics", "gateway_generations_in_flight")


def _waiting(stack: Stack) -> float:
    return metric(stack.gateway + "/metrics", "gateway_requests_waiting")


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(IDLE_WITHIN_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def _until_idle(stack: Stack) -> None:
    await _until(lambda: _active(stack) == 0)


def _body(*, stream: bool, tokens: int = OF_A_CROWD) -> dict[str, object]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": COUNT}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }


async def _cost_of_leaving(stack: Stack, *, stream: bool) -> float:
    """Return the engine's CPU seconds from the disconnect until no request is active."""
    await _until_idle(stack)
    before = await asyncio.to_thread(_steps, stack)
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=60) as client:
        body = _body(stream=stream, tokens=LONG_ANSWER)
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await _until(lambda: _steps(stack) >= before + 100)
        assert not asking.done()
        left = cpu_seconds(stack.pids["triton"])
        asking.cancel()
        await asyncio.wait([asking])
    await _until_idle(stack)
    return cpu_seconds(stack.pids["triton"]) - left


@pytest.mark.parametrize("stream", [True, False])
async def test_the_engine_stops(stack: Stack, stream: bool) -> None:
    before = _stops(stack, "disconnect")
    costs = [await _cost_of_leaving(stack, stream=stream) for _ in range(ROUNDS)]
    assert statistics.median(costs) <= STOPPED_WITHIN_CPU_S, costs
    assert _stops(stack, "disconnect") == before + ROUNDS


async def test_while_queued_and_before_the_first_token(stack: Stack) -> None:
    """Abandon more requests than the engine has slots, most of them before their first token."""
    # Requests in flight from an earlier test would be counted among the hundred below.
    await _until(lambda: _in_flight(stack) + _waiting(stack) == 0)
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
        sent = _in_flight(stack)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await _until_idle(stack)
    await _until(lambda: _in_flight(stack) == 0)
    # Each request that reached the engine is stopped. A queued request is stopped too if it got a
    # free slot before its own disconnect was seen. Otherwise the engine never received the request.
    left = sum(task.cancelled() for task in tasks)
    assert 0 < sent <= _stops(stack, "disconnect") - before <= left == len(tasks)


async def test_a_stop_string_stops_the_engine(stack: Stack) -> None:
    """Check that the engine stops within a few steps after the last token of the stop string."""
    before = _stops(stack, "stop_string")
    # Tokenized alone, " 1" has other ids than within "9, 10", so the engine cannot stop by itself.
    body = _body(stream=False, tokens=LONG_ANSWER) | {"stop": [" 1"]}
    costs = []
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=60) as client:
        for _ in range(ROUNDS):
            await _until_idle(stack)
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            answered = cpu_seconds(stack.pids["triton"])
            assert answer["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5, 6, 7, 8, 9,"
            await _until_idle(stack)
            costs.append(cpu_seconds(stack.pids["triton"]) - answered)
    assert statistics.median(costs) <= STOPPED_WITHIN_CPU_S, costs
    assert _stops(stack, "stop_string") == before + ROUNDS


async def test_a_hundred_clients_that_leave_at_random(stack: Stack) -> None:
    gateway = psutil.Process(stack.pids["gateway"])

    async def leave_after(client: httpx.AsyncClient, seconds: float, stream: bool) -> None:
        request = client.post(stack.gateway + "/v1/chat/completions", json=_body(stream=stream))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await request

    async def round_of(clients: int, seed: int) -> None:
        rng = random.Random(seed)
        async with httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None), timeout=PATIENCE_S
        ) as client:
            async with asyncio.TaskGroup() as group:
                for n in range(clients):
                    group.create_task(leave_after(client, rng.uniform(0.01, 1.0), n % 2 == 0))

    await round_of(50, 0)  # warm-up: pools, caches and compiled code reach their size
    await _until_idle(stack)
    rss, files = gateway.memory_info().rss, gateway.num_fds()
    await round_of(100, 1)
    await _until_idle(stack)
    await _until(lambda: _in_flight(stack) == 0)
    await _until(lambda: gateway.num_fds() <= files + 2)
    assert gateway.memory_info().rss - rss < 16 * 1024 * 1024
    body = _body(stream=False) | {"max_tokens": 5}
    answer = httpx.post(stack.gateway + "/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.json()["usage"]["completion_tokens"] == 5
