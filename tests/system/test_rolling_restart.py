"""Upgrades under load: restarts one by one and configuration reloads fail no request."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.http.workers import STOP_NOW_SIGNAL
from tests.support.cluster import Balancer
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.stopped import stop, wait_until_sent

pytestmark = pytest.mark.slow

KEY = "sk-acme-key"
HANGS_AFTER_S = 300
PATIENCE_S = 240
CLIENTS = 4  # few, so that a small machine has time to start a gateway
PROMPT = "The capital of France is"
ANSWER = " Paris."
LONG = body(prompt="Z", max_tokens=300, ignore_eos=True, stream=True)


class Load:
    """Clients with persistent connections that send requests until the context ends."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tasks: list[asyncio.Task[None]] = []
        self._done = asyncio.Event()
        self.answers: Counter[str] = Counter()

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._work(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the clients, and raise the first error that a client had."""
        self._done.set()
        await asyncio.gather(*self._tasks)

    async def _work(self, number: int) -> None:
        chance = random.Random(number)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=self._url, headers=headers, timeout=60) as client:
            while not self._done.is_set():
                if number:
                    answer = await client.post("/v1/completions", json=body(prompt=PROMPT) | SHORT)
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["choices"][0]["text"] == ANSWER
                    self.answers["whole"] += 1
                else:
                    self.answers["stream"] += await _stream(client)
                await asyncio.sleep(chance.uniform(0.3, 0.9))


SHORT = {"max_tokens": 8, "stop": "\n"}


async def _stream(
    client: httpx.AsyncClient, tokens: int = 100, begun: asyncio.Event | None = None
) -> int:
    """Read a stream of at least most of a second, and check that it is complete."""
    async with client.stream(
        "POST", "/v1/completions", json=LONG | {"max_tokens": tokens}
    ) as answer:
        assert answer.status_code == 200
        lines = []
        async for line in answer.aiter_lines():
            if begun is not None:
                begun.set()
            if line:
                lines.append(line)
    *frames, last, done = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert not any("error" in json.loads(frame) for frame in frames)
    return 1


async def test_a_rolling_restart_fails_no_request(stack: Stack, tmp_path: Path) -> None:
    """Restart a gateway of one process and a gateway of two workers."""
    # On a busy machine, clients and load balancers need up to this time to see the drain.
    settings = {"drain_seconds": 20, "redis_url": stack.redis}
    with ExitStack() as started:
        gateways = [
            started.enter_context(GatewayProcess(tmp_path / str(n), stack, workers=n, **settings))
            for n in (1, 2)
        ]
        balancer = Balancer([gateway.port for gateway in gateways])
        async with balancer.running() as url, Load(url) as load:
            for gateway in gateways:
                await _answers(load, 10)
                await asyncio.to_thread(_restart, gateway)
            await _answers(load, 10)
        assert load.answers["stream"] > 0
        assert min(balancer.taken.values()) > 1


async def _answers(load: Load, count: int) -> None:
    """Wait until the load has `count` more answers."""
    before = load.answers.total()
    deadline = time.monotonic() + HANGS_AFTER_S
    while load.answers.total() < before + count:
        assert time.monotonic() < deadline
        assert not any(task.done() for task in load._tasks)
        await asyncio.sleep(0.05)


def _restart(gateway: GatewayProcess) -> None:
    gateway.process.send_signal(signal.SIGTERM)
    gateway.process.wait(HANGS_AFTER_S)
    gateway.__enter__()


async def test_configurations_are_read_under_load_without_a_failure(
    stack: Stack, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    write_config(config, tenant("acme", KEY))
    with GatewayProcess(tmp_path / "g", stack, config=config, admin_port=0) as gateway:
        async with Load(gateway.url) as load:
            for round_ in range(13):  # the last file is valid
                others = [tenant(f"t{n}", f"sk-{n}-key") for n in range(round_)]
                limit = {"requests_per_minute": 10**6 + round_, "priority": round_ % 3}
                if round_ % 4 == 3:
                    config.write_text("tenants: [{", encoding="utf-8")  # invalid
                else:
                    write_config(config, tenant("acme", KEY, **limit), *others)
                if round_ % 2:
                    gateway.process.send_signal(signal.SIGHUP)
                await _answers(load, 5)
        assert load.answers["stream"] > 0
        # Wait until the last valid file is in force.
        async with gateway.async_client("sk-9-key") as client, asyncio.timeout(HANGS_AFTER_S):
            while (await client.get("/v1/models")).status_code != 200:
                await asyncio.sleep(0.1)


async def test_a_gateway_that_drains_still_answers_and_says_goodbye(
    stack: Stack, tmp_path: Path
) -> None:
    with GatewayProcess(tmp_path / "g", stack, drain_seconds=PATIENCE_S) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            assert "connection" not in (await client.get("/health/ready")).headers
            begun = asyncio.Event()
            stream = asyncio.create_task(_stream(client, 300, begun))
            async with asyncio.timeout(HANGS_AFTER_S):
                await begun.wait()
            gateway.process.send_signal(signal.SIGTERM)
            await _draining(client)
            answer = await client.post("/v1/completions", json=body())
            assert answer.status_code == 200
            assert answer.headers["connection"] == "close"
            assert await stream == 1
        gateway.process.send_signal(signal.SIGTERM)  # the second signal ends the gateway at once
        assert gateway.process.wait(HANGS_AFTER_S) in {0, -signal.SIGTERM}
        with pytest.raises(httpx.ConnectError):
            httpx.get(gateway.url + "/health/live", timeout=PATIENCE_S)


async def _serving(gateway: GatewayProcess, workers: int) -> None:
    async with asyncio.timeout(HANGS_AFTER_S):
        url = gateway.url + "/metrics"
        while await asyncio.to_thread(metric, url, "gateway_engine_ready") < workers:
            await asyncio.sleep(0.1)


async def _draining(client: httpx.AsyncClient) -> None:
    """Wait until this client's gateway or worker reports that it drains."""
    async with asyncio.timeout(HANGS_AFTER_S):
        while (ready := await client.get("/health/ready")).status_code != 503:
            await asyncio.sleep(0.01)
    assert ready.json()["status"] == "draining"


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_second_signal_ends_at_once(stack: Stack, tmp_path: Path, workers: int) -> None:
    settings = {"drain_seconds": PATIENCE_S, "workers": workers, "redis_url": stack.redis}
    with GatewayProcess(tmp_path / "g", stack, shutdown_grace=PATIENCE_S, **settings) as gateway:
        # A worker that is still starting could read both signals as one.
        await _serving(gateway, workers)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            endless = LONG | {"prompt": "Count from 1 to 300", "max_tokens": 1900}
            async with client.stream("POST", "/v1/completions", json=endless) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                gateway.process.send_signal(signal.SIGTERM)
                # Wait for the drain: a second signal is lost while the first is not handled yet.
                async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as other:
                    await _draining(other)
                assert gateway.process.poll() is None
                await anext(lines)
                gateway.process.send_signal(signal.SIGTERM)
                # This is long before the drain's time limit.
                assert await asyncio.to_thread(gateway.process.wait, PATIENCE_S / 4) is not None


async def test_a_second_signal_reaches_workers_that_had_no_turn_since_the_first(
    stack: Stack, tmp_path: Path
) -> None:
    settings = {"drain_seconds": PATIENCE_S, "workers": 2, "redis_url": stack.redis}
    with GatewayProcess(tmp_path / "g", stack, **settings) as gateway:
        await _serving(gateway, 2)
        workers = _workers(gateway)
        try:
            for worker in workers:
                stop(psutil.Process(worker))
            for number in (signal.SIGTERM, STOP_NOW_SIGNAL):
                gateway.process.send_signal(signal.SIGTERM)
                for worker in workers:
                    wait_until_sent(worker, number)
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGCONT)
        # This is long before the drain's time limit.
        assert await asyncio.to_thread(gateway.process.wait, PATIENCE_S / 4) is not None


async def test_a_service_manager_may_signal_every_process(stack: Stack, tmp_path: Path) -> None:
    """Check that a worker with two signals still finishes its requests.

    systemd signals the worker, and so does the gateway's main process.
    """
    settings = {"drain_seconds": 20, "workers": 2, "redis_url": stack.redis}
    with GatewayProcess(tmp_path / "g", stack, shutdown_grace=PATIENCE_S, **settings) as gateway:
        await _serving(gateway, 2)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as client:
            long = LONG | {"prompt": "Count from 1 to 300", "max_tokens": 1900}
            async with (
                httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as other,
                client.stream("POST", "/v1/completions", json=long) as answer,
            ):
                lines = answer.aiter_lines()
                await anext(lines)
                for worker in _workers(gateway):
                    os.kill(worker, signal.SIGTERM)
                await _draining(other)
                gateway.process.send_signal(signal.SIGTERM)
                assert "data: [DONE]" in [line async for line in lines]
        gateway.process.send_signal(signal.SIGTERM)  # the second signal ends the gateway at once
        assert await asyncio.to_thread(gateway.process.wait, HANGS_AFTER_S) == 0


def _workers(gateway: GatewayProcess) -> list[int]:
    pid = gateway.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
