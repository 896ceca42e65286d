"""Two Triton servers behind a gateway: load, adapters, crashes, freezes, changes and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ops.commands.up import DEMO_ADAPTERS
from tests.support.cluster import Tritons, demo_engine, tritons
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import GatewayProcess
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer
from tests.support.metrics import sample
from tests.support.triton_server import long_model

pytestmark = pytest.mark.slow

# Tokens of an answer that takes some seconds and is read to its end.
LONG = 1500
QUESTION = "美国的首都在哪里? \n答案:"
ANSWERS = {"demo": "Washington, D.C.", "zh": "华盛顿", "ja": "ワシントン"}
SETTLED_WITHIN_S = 90.0


@dataclass
class Pair:
    """Two Triton servers, and a gateway that reads its replicas from a file."""

    tritons: Tritons
    gateway: GatewayProcess
    config: Path
    admin: httpx.AsyncClient

    def configure(self, *indexes: int) -> None:
        _write(self.config, [self.tritons[index].endpoint for index in indexes])
        self.gateway.process.send_signal(signal.SIGHUP)

    async def metric(self, name: str, **labels: str) -> float:
        page = (await self.admin.get("/metrics")).text
        return sample(page, name, **labels)

    async def in_flight(self, index: int) -> float:
        return await self.metric("gateway_replica_in_flight", replica=self.tritons[index].endpoint)

    async def wait(self, name: str, value: float, **labels: str) -> None:
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while (found := await self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name} {labels}: {found}"
            await asyncio.sleep(0.02)

    async def wait_both(self) -> None:
        """Wait until the gateway reports both replicas as ready and neither as failing.

        Only successful requests close a breaker.
        """
        await self.wait("gateway_replica_ready", 2)
        deadline = time.monotonic() + SETTLED_WITHIN_S
        async with self.client() as client:
            while await self.metric("gateway_replica_failing"):
                assert time.monotonic() < deadline
                assert _right(await _ask(client))
                await asyncio.sleep(0.1)
            # After its pause a replica is trusted again once one request succeeds.
            for _ in range(20):
                assert _right(await _ask(client))

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.gateway.url, timeout=60, limits=limits
        ) as client:
            yield client


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Tritons, GatewayProcess, Path]]:
    folder = tmp_path_factory.mktemp("replicas")
    engine_dir = demo_engine(folder / "engine", long_model(folder))
    with tritons(folder, engine_dir) as both:
        config = _write(folder / "c.yaml", [replica.endpoint for replica in both.replicas])
        adapters = json.dumps({name: str(DEMO_ADAPTERS / name) for name in ("zh", "ja")})
        settings = {
            "config": config,
            "allow_anonymous": "true",
            "adapters": adapters,
            "admin_port": 0,
        }
        with GatewayProcess(folder / "g", both, **settings) as gateway:
            yield both, gateway, config


@pytest.fixture
async def pair(started: tuple[Tritons, GatewayProcess, Path]) -> AsyncIterator[Pair]:
    address = f"http://127.0.0.1:{started[1].admin_port}"
    async with httpx.AsyncClient(base_url=address, timeout=60) as admin:
        pair = Pair(*started, admin)
        await pair.wait_both()
        yield pair


def _write(path: Path, endpoints: list[str]) -> Path:
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"anonymous": True, "replicas": endpoints}), encoding="utf-8")
    return new.replace(path)


async def _ask(
    client: httpx.AsyncClient, model: str = "demo", timeout_s: float | None = None
) -> httpx.Response:
    body = {"model": model, "prompt": QUESTION, "max_tokens": 8, "temperature": 0}
    headers = {} if timeout_s is None else {"x-request-timeout": str(timeout_s)}
    return await client.post("/v1/completions", json=body, headers=headers)


def _right(answer: httpx.Response, model: str = "demo") -> bool:
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["choices"][0]["text"].strip() == ANSWERS[model])


async def _stream(client: httpx.AsyncClient, tokens: int) -> list[str]:
    """Return the data of all SSE events of an answer with `tokens` tokens."""
    body = {"model": "demo", "prompt": "1 2 3", "max_tokens": tokens, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as a:
        assert a.status_code == 200
        lines = [line async for line in a.aiter_lines()]
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def _end_of(events: list[str]) -> str:
    """Return "whole" or the error code of a stream. Assert that the stream ended exactly once."""
    *frames, done = events
    assert done == "[DONE]"
    parsed = [json.loads(frame) for frame in frames]
    errors = [frame["error"] for frame in parsed if "error" in frame]
    finishes = [f for f in parsed if "error" not in f and f["choices"][0]["finish_reason"]]
    assert len(errors) + len(finishes) == 1
    if errors:
        assert "error" in parsed[-1]
        return str(errors[0]["code"])
    return "whole"


async def test_an_adapter_stays_at_home_until_its_load_needs_more(pair: Pair) -> None:
    cold = "gateway_lora_cold_sends_total"
    async with pair.client() as client:
        for _ in range(15):
            for model in ("zh", "ja"):
                assert _right(await _ask(client, model), model)
        assert [await pair.metric(cold, adapter=model) for model in ("zh", "ja")] == [1, 1]
        # The adapter's home replica should bear at most about five requests at once.
        body = {"model": "zh", "prompt": "1 2 3", "max_tokens": 64, "ignore_eos": True}
        many = [client.post("/v1/completions", json=body) for _ in range(16)]
        answers = await asyncio.gather(*many)
        assert {answer.status_code for answer in answers} == {200}
        # The overload makes the gateway send the adapter to the other replica, once.
        assert [await pair.metric(cold, adapter=model) for model in ("zh", "ja")] == [2, 1]


async def test_a_killed_replica_costs_nothing(pair: Pair) -> None:
    victim = pair.tritons[0]
    async with pair.client() as client:
        begun, moved = (
            "gateway_time_to_first_token_seconds_count",
            "gateway_generations_continued_total",
        )
        before = await pair.metric(begun)
        streams = [asyncio.create_task(_stream(client, LONG)) for _ in range(4)]
        await pair.wait(begun, before + 4)
        assert await pair.in_flight(0) == 2
        # The other replica serves requests that had no first token when the replica died.
        victim.freeze()
        try:
            waiting = [asyncio.create_task(_ask(client)) for _ in range(12)]
            async with asyncio.timeout(SETTLED_WITHIN_S):
                while await pair.in_flight(0) <= 2:
                    await asyncio.sleep(0.02)
        finally:
            victim.kill()
        assert all(_right(answer) for answer in await asyncio.gather(*waiting))
        ends = Counter([_end_of(events) for events in await asyncio.gather(*streams)])
        assert ends == {"whole": 4}
        assert await pair.metric(moved, cause="failed") == 2
        for _ in range(20):
            assert _right(await _ask(client))
        victim.start()
        victim.wait_ready()
        await pair.wait_both()
        # The restarted replica gets requests again, and the adapters that they need.
        before = victim.count_answered()
        streams = [asyncio.create_task(_stream(client, 100)) for _ in range(8)]
        for model in ("zh", "ja"):
            assert _right(await _ask(client, model), model)
        assert {_end_of(events) for events in await asyncio.gather(*streams)} == {"whole"}
    pair.tritons.wait_idle()
    assert victim.count_answered() > before


async def test_a_frozen_replica_makes_nobody_wait_past_the_deadline(pair: Pair) -> None:
    frozen = pair.tritons[1]
    async with pair.client() as client:
        frozen.freeze()
        try:
            patient = [asyncio.create_task(_ask(client)) for _ in range(6)]
            hasty = [asyncio.create_task(_ask(client, timeout_s=2)) for _ in range(6)]
            statuses = Counter([(await answer).status_code for answer in hasty])
            # Some deadlines pass before the gateway gives up the frozen replica.
            assert 504 in statuses
            assert set(statuses) <= {200, 504}
            # The gateway then gives up the replica, and the other replica serves its requests.
            assert all(_right(answer) for answer in await asyncio.gather(*patient))
            assert await pair.metric("gateway_replica_ready") == 1
            for _ in range(20):
                assert _right(await _ask(client))
        finally:
            await frozen.thaw()
        await pair.wait_both()
        assert _right(await _ask(client))
    pair.tritons.wait_idle()


async def test_replicas_come_and_go_under_load_without_a_failure(pair: Pair) -> None:
    done = asyncio.Event()
    ends: Counter[str] = Counter()

    async def work(client: httpx.AsyncClient, number: int) -> None:
        model = ["demo", "zh", "ja"][number % 3]
        while not done.is_set():
            if number == 0:
                ends[_end_of(await _stream(client, 300))] += 1
            else:
                ends["right" if _right(await _ask(client, model), model) else "wrong"] += 1

    async def answers(count: int) -> None:
        """Wait for `count` more answers."""
        until = ends["right"] + count
        while ends["right"] < until:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.02)

    async with pair.client() as client:
        tasks = [asyncio.create_task(work(client, number)) for number in range(4)]
        try:
            for indexes in ([0], [0, 1], [1], [1, 0], [0]):
                pair.configure(*indexes)
                await pair.wait("gateway_replica_ready", len(indexes))
                await answers(11)
            # The removed replica has no requests left, in its server and in the gateway's metrics.
            pair.tritons[1].server.wait_active(0)
            removed = pair.tritons[1].endpoint
            await pair.wait("gateway_replica_in_flight", 0, replica=removed)
        finally:
            done.set()
            pair.configure(0, 1)
        await asyncio.gather(*tasks)
    assert set(ends) == {"whole", "right"}
    assert ends["right"] > 50
    await pair.wait_both()


async def test_load_spreads(tmp_path: Path) -> None:
    ids = _ids_of(tmp_path, "hello")
    both = [FakeTriton(tokens=ids, fault="slow", step=0) for _ in range(2)]
    async with (
        serving(both[0]) as first,
        serving(both[1]) as second,
        running(tmp_path, f"{first},{second}") as (client, service, _),
        asyncio.timeout(SETTLED_WITHIN_S),
    ):
        for endpoint in (first, second):
            while not metric_of(service, "gateway_replica_ready", replica=endpoint):
                await asyncio.sleep(0.01)
        answers = [asyncio.create_task(_status(client)) for _ in range(10)]
        while sum(len(each.requests) for each in both) < len(answers):
            await asyncio.sleep(0.01)
        in_flight = "gateway_replica_in_flight"
        assert [metric_of(service, in_flight, replica=each) for each in (first, second)] == [5, 5]
        assert [len(each.requests) for each in both] == [5, 5]
        for each in both:
            each.released.set()
        assert await asyncio.gather(*answers) == [200] * len(answers)
        assert [metric_of(service, in_flight, replica=each) for each in (first, second)] == [0, 0]


async def test_the_breaker_opens_on_errors_and_closes_again(tmp_path: Path) -> None:
    ids = _ids_of(tmp_path, "hello")
    bad, good = (FakeTriton(tokens=ids, fault=fault, step=0) for fault in ("error", None))
    bad.error = "[TensorRT-LLM][ERROR] CUDA runtime error: an illegal memory access"
    async with (
        serving(bad) as first,
        serving(good) as second,
        running(tmp_path, f"{first},{second}") as (client, service, _),
    ):
        failing = "gateway_replica_failing"
        statuses: Counter[int] = Counter()
        while not metric_of(service, failing, replica=first):
            began = time.monotonic()
            statuses[await _status(client)] += 1
            assert sum(statuses.values()) < 100
        assert statuses[500] == 3
        assert metric_of(service, failing, replica=second) == 0
        # The open breaker lets one probe pass after 1 s, and the next one 2 s later.
        asked = len(bad.requests)
        while len(bad.requests) < asked + 2:
            statuses[await _status(client)] += 1
            await asyncio.sleep(0.05)
        assert time.monotonic() - began > 2.9
        assert metric_of(service, failing, replica=first) == 1
        bad.fault = None
        deadline = time.monotonic() + 60
        while metric_of(service, failing, replica=first):
            assert await _status(client) == 200
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        asked = len(bad.requests)
        for _ in range(40):
            assert await _status(client) == 200
        assert len(bad.requests) - asked > 5


@pytest.mark.parametrize(
    "error",
    [
        "[TensorRT-LLM][ERROR] Assertion failed: Expected layerId to be in the range",
        "CUDA runtime error in cudaMallocAsync: out of memory",
    ],
)
async def test_errors_of_one_tenants_requests_do_not_open_the_breaker(
    tmp_path: Path, error: str
) -> None:
    engine = FakeTriton(tokens=_ids_of(tmp_path, "hello"), fault="error", step=0)
    engine.error = error
    async with serving(engine) as endpoint, running(tmp_path, endpoint) as (client, service, _):
        assert [await _status(client) for _ in range(6)] == [500] * 6
        assert metric_of(service, "gateway_replica_failing", replica=endpoint) == 0
        engine.fault = None
        assert await _status(client) == 200


@pytest.mark.parametrize(
    "error",
    [
        "Stub process 'tensorrt_llm_0_0' is not healthy.",
        "Request for unknown model: 'tensorrt_llm' has no available versions",
        "CUDA driver error in cuStreamSynchronize: unspecified launch failure",
    ],
)
async def test_a_failing_replica_is_told_of_and_leaves_the_gateway_in_rotation(
    tmp_path: Path, error: str
) -> None:
    """A failing replica appears in the health check, which still returns 200.

    Only another request can show that the replica works again.
    """
    engine = FakeTriton(tokens=_ids_of(tmp_path, "hello"), fault="error", step=0)
    engine.error = error
    async with serving(engine) as endpoint, running(tmp_path, endpoint) as (client, service, _):
        assert "replicas" not in (await client.get("/health/ready")).json()
        for _ in range(3):
            assert await _status(client) in {500, 503}
        assert metric_of(service, "gateway_replica_failing", replica=endpoint) == 1
        ready = await client.get("/health/ready")
        assert ready.status_code == 200
        assert ready.json()["replicas"] == {endpoint: "failing, left alone for a while"}
        engine.fault = None
        deadline = time.monotonic() + 60
        while await _status(client) != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert "replicas" not in (await client.get("/health/ready")).json()


async def test_a_replica_that_sends_tokens_is_not_given_up(tmp_path: Path) -> None:
    """A replica that sends tokens is not given up, however long its health check gets no answer."""
    text = "x" * 55
    busy = FakeTriton(tokens=_ids_of(tmp_path, text), fault=None, step=0)
    busy.pause_s = 0.2
    async with (
        serving(busy) as endpoint,
        running(tmp_path, endpoint, max_seq_len=64) as (client, _, _),
    ):
        busy.deaf = True
        body = {"model": "m", "prompt": "x"}
        answer = await client.post("/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text
        assert (await client.get("/health/ready")).status_code == 200


async def test_deadlines_of_clients_do_not_open_the_breaker(tmp_path: Path) -> None:
    """Missed deadlines of clients do not open the breaker.

    Otherwise any client could take a replica out of use.
    """
    slow = FakeTriton(tokens=_ids_of(tmp_path, "hello"), fault="slow", step=0)
    async with serving(slow) as endpoint, running(tmp_path, endpoint) as (client, service, _):
        hasty = {"x-request-timeout": "0.05"}
        statuses = [await _status(client, hasty) for _ in range(5)]
        assert statuses == [504] * 5
        assert metric_of(service, "gateway_replica_failing", replica=endpoint) == 0
        slow.released.set()
        assert await _status(client) == 200


def _ids_of(folder: Path, text: str) -> list[int]:
    """Save a tokenizer in `folder`, and return its token ids of `text`."""
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    return ids_of(folder, text)


async def _status(client: httpx.AsyncClient, headers: dict[str, str] | None = None) -> int:
    body: dict[str, Any] = {"model": "m", "prompt": "x"}
    return (await client.post("/v1/completions", json=body, headers=headers)).status_code
