"""The usage log: exactly one correct line for each request, however the request ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.raw_http import post
from tests.support.triton_server import LONG_ANSWER

KEY, OTHER_KEY = "sk-acme-key", "sk-other-key"
TEXT = "hello"
# More tokens than all socket buffers hold, but fewer than an engine may send unread.
UNREAD = 3000
FIELDS = {
    "id", "request_id", "tenant", "model", "adapter", "adapter_version", "prompt_tokens",
    "cached_tokens", "completion_tokens", "status", "finish", "started", "ended",
}  # fmt: skip


def _records(path: Path) -> list[dict[str, Any]]:
    """Return all records of the log. Assert that every line is complete."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(set(record) == FIELDS for record in records)
    assert len({record["id"] for record in records}) == len(records)
    return records


async def _wait_for_records(path: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 60
    while len(records := _records(path)) < count:
        assert time.monotonic() < deadline, records
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)  # leave time for a wrong additional record
    assert len(_records(path)) == count
    return records


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.01)


class _Case:
    """A gateway with two tenants before an engine that answers TEXT or fails at a step."""

    def __init__(self, folder: Path, fault: Fault | None, step: int = 2) -> None:
        save_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
        self.folder = folder
        self.log = folder / "usage.jsonl"
        self.servicer = FakeTriton(tokens=ids_of(folder, TEXT), fault=fault, step=step)
        self.config = write_config(
            folder / "c.yaml",
            tenant("acme", KEY, tokens_per_minute=10_000, concurrent_requests=3),
            tenant("other", OTHER_KEY),
        )

    def gateway(self, endpoint: str, **settings: Any) -> Any:
        settings = {"config": self.config, "usage_log": self.log} | settings
        return running(self.folder, endpoint, **settings)


HEADERS = {"authorization": f"Bearer {KEY}"}
REQUEST = {"model": "m", "prompt": "xyz", "max_tokens": 40}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "step", "status", "tokens"),
    [
        (None, 0, 200, (3, 5)),
        ("abort", 0, 503, (0, 0)),
        ("abort", 2, 503, (3, 2)),
        ("error", 2, 503, (3, 2)),
        ("truncate", 2, 503, (3, 2)),
        ("stall", 0, 504, (0, 0)),
        ("stall", 2, 504, (3, 2)),
    ],
)
async def test_one_record_for_every_end(
    tmp_path: Path,
    stream: bool,
    fault: Fault | None,
    step: int,
    status: int,
    tokens: tuple[int, int],
) -> None:
    clock = EventClock()
    case = _Case(tmp_path, fault, step)
    async with (
        serving(case.servicer) as endpoint,
        case.gateway(endpoint) as (client, service, _),
    ):
        headers = HEADERS | {"x-request-id": "mine"}
        before = time.time()
        body = REQUEST | {"stream": stream}
        asked = client.post("/v1/completions", json=body, headers=headers, timeout=None)
        answer = await clock.leap_once(
            lambda: fault == "stall" and case.servicer.reached > 0, asked
        )
        # The record is in the file before the client sees the end of the answer.
        (record,) = _records(case.log)
        assert record["status"] == status
        assert (record["prompt_tokens"], record["completion_tokens"]) == tokens
        assert record["finish"] == (["stop"] if fault is None else [])
        assert (record["tenant"], record["model"], record["request_id"]) == ("acme", "m", "mine")
        assert (record["adapter"], record["adapter_version"]) == (None, None)
        assert before - 1 <= record["started"] <= record["ended"] <= time.time() + 1
        if fault is None:
            assert f'"cmpl-{record["id"]}"' in answer.text
        metrics = service.metrics.registry.get_sample_value
        labels = {"tenant": "acme", "model": "m", "adapter": ""}
        count = metrics("gateway_tenant_requests_total", labels | {"status": str(status)})
        assert count == 1
        for kind, expected in zip(("prompt", "completion"), tokens, strict=True):
            counted = metrics("gateway_tenant_tokens_total", labels | {"kind": kind})
            assert counted == expected
        # The request's slot is free again, and only the tokens that it used are counted.
        case.servicer.fault = None
        again = await client.post("/v1/completions", json=REQUEST, headers=HEADERS)
        assert again.status_code == 200
        left = 10_000 - sum(tokens) - 43
        assert int(again.headers["x-ratelimit-remaining-tokens"]) == left


async def test_no_answer_ends_before_it_began_by_a_clock_that_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _Case(tmp_path, None)
    async with serving(case.servicer) as endpoint, case.gateway(endpoint) as (client, _, _):
        right, hours = time.time, itertools.count()
        monkeypatch.setattr(time, "time", lambda: right() - 3600 * next(hours))
        began = time.monotonic()
        answer = await client.post("/v1/completions", json=REQUEST, headers=HEADERS)
        took = time.monotonic() - began
        assert answer.status_code == 200
    (record,) = _records(case.log)
    assert 0 <= record["ended"] - record["started"] <= took + 0.01


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_of_the_clients_own_makes_nothing_free(
    tmp_path: Path, stream: bool, step: int
) -> None:
    clock = EventClock()
    case = _Case(tmp_path, "stall", step)
    async with serving(case.servicer) as endpoint, case.gateway(endpoint) as (client, _, _):
        asked = client.post(
            "/v1/completions",
            json=REQUEST | {"stream": stream},
            headers=HEADERS | {"x-request-timeout": "120"},
            timeout=240,
        )
        answer = await clock.leap_once(lambda: case.servicer.reached > 0, asked, 180)
        (record,) = _records(case.log)
        assert case.servicer.requests
        assert record["status"] == 504
        assert (record["prompt_tokens"], record["completion_tokens"]) == (3, step)
        case.servicer.fault = None
        again = await client.post("/v1/completions", json=REQUEST, headers=HEADERS)
        left = 10_000 - (3 + step) - 43
        assert int(again.headers["x-ratelimit-remaining-tokens"]) == left, answer.text


@pytest.mark.parametrize("how", ["deadline", "hang-up"])
async def test_a_beam_search_that_is_broken_off_is_paid_for(
    long_stack: Stack, tmp_path: Path, how: str
) -> None:
    """A beam search that ends early is billed for its prompt and all tokens it asked for."""
    clock = EventClock()
    log = tmp_path / "usage.jsonl"
    beams = body(n=3, use_beam_search=True, ignore_eos=True, temperature=0) | {"model": "m"}

    def steps() -> float:
        labels = {"model": "tensorrt_llm", "general_type": "iteration_counter"}
        return metric(long_stack.triton_metrics, "nv_trt_llm_general_metrics", **labels)

    settings: dict[str, Any] = {"tokenizer_dir": DEMO_MODEL, "max_seq_len": None, "usage_log": log}
    async with running(tmp_path, long_stack.triton_grpc, **settings) as (client, _, _):
        short = await client.post("/v1/completions", json=beams | {"max_tokens": 5})
        whole = short.json()["usage"]
        before = steps()
        asking = asyncio.create_task(
            client.post(
                "/v1/completions",
                json=beams | {"max_tokens": LONG_ANSWER},
                headers={"x-request-timeout": "120"},
                timeout=240,
            )
        )
        # Wait until the engine works on the request.
        if how == "deadline":
            answer = await clock.leap_once(lambda: steps() >= before + 20, asking, 180)
            assert answer.status_code == 504
        else:
            await _until(lambda: asking.done() or steps() >= before + 20)
            asking.cancel()
            await asyncio.wait([asking])
        first, second = await _wait_for_records(log, 2)
    assert first["completion_tokens"] == whole["completion_tokens"] == 15
    assert second["prompt_tokens"] == whole["prompt_tokens"]
    assert second["completion_tokens"] == 3 * LONG_ANSWER


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
async def test_one_record_when_the_client_leaves(
    tmp_path: Path, stream: bool, step: int, choices: int
) -> None:
    case = _Case(tmp_path, "stall", step)
    async with (
        serving(case.servicer) as endpoint,
        case.gateway(endpoint) as (client, _, _),
    ):
        asked = {**REQUEST, "stream": stream, "n": choices}
        asking = asyncio.create_task(client.post("/v1/completions", json=asked, headers=HEADERS))
        await _until(lambda: case.servicer.reached == choices)
        case.servicer.fault = None
        # This request uses the same connection to the engine, so all earlier data has arrived.
        headers = {"authorization": f"Bearer {OTHER_KEY}"}
        between = await client.post("/v1/completions", json=REQUEST, headers=headers)
        assert between.status_code == 200
        asking.cancel()
        _, record = await _wait_for_records(case.log, 2)
        assert (record["status"], record["finish"]) == (499, [])
        # The prompt is billed, as the client was still connected when the engine processed it.
        assert (record["prompt_tokens"], record["completion_tokens"]) == (3, step * choices)
        again = await client.post("/v1/completions", json=REQUEST, headers=HEADERS)
        assert again.status_code == 200
        await _wait_for_records(case.log, 3)


@pytest.mark.parametrize("how", ["hang-up", "hang-up behind the end", "deadline"])
async def test_who_reads_nothing_pays_for_what_the_engine_made(tmp_path: Path, how: str) -> None:
    """A client that reads nothing is billed for all tokens that the engine made.

    Most of the tokens wait in the gateway for the client, and are then discarded.
    """
    clock, loop = EventClock(), asyncio.get_running_loop()
    case = _Case(tmp_path, "stall", step=UNREAD)
    case.servicer.tokens = ids_of(tmp_path, "a" * UNREAD)
    if how != "hang-up behind the end":
        case.servicer.tokens.append(0)  # a last token that never comes
    settings: dict[str, Any] = {"max_seq_len": 2 * UNREAD, "write_timeout": 3600}
    async with (
        serving(case.servicer) as endpoint,
        case.gateway(endpoint, **settings) as (client, _, server),
    ):
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await loop.sock_connect(reader, ("127.0.0.1", client.base_url.port or 0))
            await _until(lambda: len(server.server_state.connections) == 1)
            (connection,) = server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            content = json.dumps(REQUEST | {"max_tokens": UNREAD + 1, "stream": True}).encode()
            headers = f"authorization: Bearer {KEY}\r\nx-request-timeout: 600".encode()
            await loop.sock_sendall(reader, post("/v1/completions", content, headers))
            every = len(case.servicer.tokens)
            await _until(lambda: case.servicer.given == every)
            # This request uses the same connection to the engine, so all earlier data has arrived.
            case.servicer.tokens, case.servicer.fault = ids_of(tmp_path, TEXT), None
            headers_of_other = {"authorization": f"Bearer {OTHER_KEY}"}
            between = await client.post("/v1/completions", json=REQUEST, headers=headers_of_other)
            assert between.status_code == 200
            if how == "deadline":
                clock.leap(700)
                await asyncio.sleep(0.01)  # let the timer of the request run first
        _, record = await _wait_for_records(case.log, 2)
    status = 504 if how == "deadline" else 499
    assert (record["tenant"], record["status"], record["finish"]) == ("acme", status, [])
    assert (record["prompt_tokens"], record["completion_tokens"]) == (3, UNREAD)


@pytest.mark.parametrize("stream", [True, False])
async def test_one_record_when_the_gateway_ends(tmp_path: Path, stream: bool) -> None:
    clock = EventClock()
    case = _Case(tmp_path, "stall", 2)
    async with serving(case.servicer) as endpoint:
        async with case.gateway(endpoint, shutdown_grace=120) as (client, service, server):
            asked = REQUEST | {"stream": stream}
            request = asyncio.create_task(
                client.post("/v1/completions", json=asked, headers=HEADERS, timeout=240)
            )
            await _until(lambda: case.servicer.reached > 0)
            server.should_exit = True
            ended = asyncio.wait([request])
            await clock.leap_once(lambda: service.replicas.draining, ended, 180)
    (record,) = _records(case.log)
    assert (record["status"], record["completion_tokens"]) == (503, 2)


async def test_no_record_for_what_was_not_let_in(tmp_path: Path) -> None:
    case = _Case(tmp_path, None)
    async with serving(case.servicer) as endpoint, case.gateway(endpoint) as (client, _, _):
        for sent, headers, status in (
            (REQUEST, {}, 401),
            (REQUEST | {"model": "other"}, HEADERS, 404),
            (REQUEST | {"max_tokens": "x"}, HEADERS, 400),
            (REQUEST | {"n": 3, "max_tokens": None, "best_of": None}, HEADERS, 200),
            (REQUEST | {"n": 4}, HEADERS, 400),
            (REQUEST | {"n": 128, "max_tokens": 60, "prompt": ["a"] * 2}, HEADERS, 400),
        ):
            answer = await client.post("/v1/completions", json=sent, headers=headers)
            assert answer.status_code in {status, 429}, answer.text
        refused = [r for r in _records(case.log) if r["status"] != 200]
    assert not refused


async def test_without_keys_the_tenant_is_null(tmp_path: Path) -> None:
    case = _Case(tmp_path, None)
    async with (
        serving(case.servicer) as endpoint,
        running(tmp_path, endpoint, usage_log=case.log) as (client, service, _),
    ):
        answer = await client.post("/v1/completions", json=REQUEST | {"n": 2})
        (record,) = _records(case.log)
        assert record["tenant"] is None
        assert record["finish"] == ["stop", "stop"]
        assert record["completion_tokens"] == answer.json()["usage"]["completion_tokens"] == 10
        text = [family.name for family in service.metrics.registry.collect() if family.samples]
        assert "gateway_tenant_requests" not in text


async def test_who_leaves_the_queue_pays_nothing(tmp_path: Path) -> None:
    case = _Case(tmp_path, "stall", 2)
    async with (
        serving(case.servicer) as endpoint,
        running(tmp_path, endpoint, usage_log=case.log, max_in_flight=1) as (client, service, _),
    ):
        first = asyncio.create_task(client.post("/v1/completions", json=REQUEST))
        await _until(lambda: bool(case.servicer.requests))
        second = asyncio.create_task(client.post("/v1/completions", json=REQUEST))
        await _until(lambda: metric_of(service, "gateway_requests_waiting") == 1)
        second.cancel()
        (record,) = await _wait_for_records(case.log, 1)
        assert (record["status"], record["prompt_tokens"]) == (499, 0)
        assert len(case.servicer.requests) == 1
        first.cancel()
        await _wait_for_records(case.log, 2)


async def test_echo_alone_and_beams_are_counted(tmp_path: Path) -> None:
    case = _Case(tmp_path, None)
    async with (
        serving(case.servicer) as endpoint,
        running(tmp_path, endpoint, usage_log=case.log) as (client, _, _),
    ):
        echo = {**REQUEST, "echo": True, "max_tokens": 0}
        assert (await client.post("/v1/completions", json=echo)).status_code == 200
        (record,) = _records(case.log)
        assert (record["prompt_tokens"], record["completion_tokens"]) == (3, 0)
        assert record["finish"] == ["length"]


def test_two_gateways_share_a_file_that_is_rotated_under_load(stack: Stack, tmp_path: Path) -> None:
    """Each request has one complete line in one of the files, which agrees with the response."""
    log, old = tmp_path / "usage.jsonl", tmp_path / "usage.jsonl.1"
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY), tenant("other", OTHER_KEY))
    common: dict[str, object] = {
        "config": config,
        "usage_log": log,
        "adapters": json.dumps({"acme/zh": str(DEMO_ADAPTERS / "zh")}),
        "admin_port": 0,
        # so that responses contain the number of cached tokens, too
        "tenants_trust_each_other": True,
    }
    with (
        GatewayProcess(tmp_path / "1", stack, **common) as first,
        GatewayProcess(tmp_path / "2", stack, **common) as second,
    ):
        seen = asyncio.run(_load([first, second], log, old))
        records = _records(old) + _records(log)
        # The gateway notices clients that left a moment later.
        deadline = time.monotonic() + 60
        while len(records) < len(seen) and time.monotonic() < deadline:
            time.sleep(0.05)
            records = _records(old) + _records(log)
        assert old.exists()
        assert log.exists()
        assert Counter(r["request_id"] for r in records) == Counter(seen.keys())
        for record in records:
            tenant_name, usage = seen[record["request_id"]]
            assert record["tenant"] == tenant_name
            if usage is not None:
                assert record["status"] == 200
                assert record["prompt_tokens"] == usage["prompt_tokens"]
                assert record["completion_tokens"] == usage["completion_tokens"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert record["cached_tokens"] == cached
            if record["adapter"] is not None:
                assert record["adapter_version"].startswith("acme/zh@")
        for kind in ("prompt", "completion"):
            counted = sum(
                metric(
                    f"http://127.0.0.1:{gateway.admin_port}/metrics",
                    "gateway_tenant_tokens_total",
                    tenant="acme",
                    kind=kind,
                )
                for gateway in (first, second)
            )
            mine = [r for r in records if r["tenant"] == "acme"]
            assert counted == sum(r[f"{kind}_tokens"] for r in mine)


async def _load(
    gateways: list[GatewayProcess], log: Path, old: Path
) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Return, by request id, the tenant and the usage in the response, None if the client left."""
    seen: dict[str, tuple[str, dict[str, Any] | None]] = {}
    chance = random.Random(1)

    async def one(number: int) -> None:
        gateway = gateways[number % 2]
        name, key = ("acme", KEY) if number % 3 else ("other", "sk-other-key")
        model = "acme/zh" if name == "acme" and number % 4 else "demo"
        fields = body(model=model, prompt="Count from 1 to 300", max_tokens=chance.randint(1, 30))
        request_id = f"r{number}"
        async with gateway.async_client(key) as client:
            headers = {"x-request-id": request_id}
            if number % 5 == 0:  # disconnects in the middle
                fields |= {"stream": True, "max_tokens": 1500, "ignore_eos": True}
                async with client.stream(
                    "POST", "/v1/completions", json=fields, headers=headers
                ) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_lines():
                        break
                seen[request_id] = name, None
                return
            answer = await client.post("/v1/completions", json=fields, headers=headers)
            assert answer.status_code == 200
            seen[request_id] = name, answer.json()["usage"]

    tasks = [asyncio.create_task(one(number)) for number in range(60)]
    while len(seen) < 20:
        await asyncio.sleep(0.02)
    log.rename(old)
    for gateway in gateways:
        gateway.process.send_signal(signal.SIGHUP)
    await asyncio.gather(*tasks)
    return seen
