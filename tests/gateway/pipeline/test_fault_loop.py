"""Engine faults at each step of an answer: every request has one end, an answer or a clear error.

After each request, all permits are free again, an engine that still listens was asked to stop, and
the usage log has the request once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

pytestmark = pytest.mark.slow

TEXT = "hello"
KEY = "sk-acme-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
WITHIN_S = 300.0
DEADLINE_S = 20.0


@dataclass
class Case:
    """A gateway with slots for one request, and a fake engine that answers `TEXT`."""

    engine: FakeTriton
    client: httpx.AsyncClient
    service: Any
    log: Path
    clock: EventClock
    choices: int = 1

    async def ask(self, *, stream: bool) -> httpx.Response:
        """Send a request. If the engine stalls, pass the deadline once all choices have stalled."""
        asked = self.client.post("/v1/completions", json=self.body(stream=stream), timeout=None)
        if self.engine.fault != "stall":
            return await asked
        answer: httpx.Response = await self.clock.leap_once(
            lambda: self.engine.reached == self.choices, asked, DEADLINE_S
        )
        return answer

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def body(self, *, stream: bool) -> dict[str, Any]:
        return {"model": "m", "prompt": "xyz", "max_tokens": 40, "stream": stream} | (
            {"n": self.choices} if self.choices > 1 else {}
        )

    async def wait_settled(self, requests: int) -> None:
        """Wait until nothing runs, permits are free, and the log has `requests` unique entries."""
        deadline = time.monotonic() + WITHIN_S
        while (
            self.service.admission.in_flight
            or self.service.admission.waiting
            or metric_of(self.service, "gateway_generations_in_flight")
            or any(replica.in_flight for replica in self.service.replicas)
            or len(self.records()) < requests
        ):
            assert time.monotonic() < deadline, self.records()
            await asyncio.sleep(0.01)
        assert len(self.records()) == len({r["id"] for r in self.records()}) == requests

    async def ask_again(self) -> None:
        """Assert that a request without a fault succeeds, so the tenant's only slot is free."""
        fault, self.engine.fault = self.engine.fault, None
        answer = await self.client.post("/v1/completions", json=self.body(stream=False))
        self.engine.fault = fault
        assert answer.status_code == 200, answer.text
        assert {choice["text"] for choice in answer.json()["choices"]} == {TEXT}


@asynccontextmanager
async def case(folder: Path, fault: Fault, choices: int = 1) -> AsyncIterator[Case]:
    clock = EventClock()
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    engine = FakeTriton(tokens=ids_of(folder, TEXT), fault=fault, step=0)
    log = folder / "usage.jsonl"
    config = write_config(folder / "c.yaml", tenant("acme", KEY, concurrent_requests=choices))
    settings = {"config": config, "usage_log": log, "queue_timeout": 1}
    # The deadline comes before the first keep-alive and before idle connections are closed.
    settings |= {"request_timeout": DEADLINE_S, "keep_alive": 60}
    # All choices run at once, so that none waits for a slot while the engine stalls.
    settings |= {"max_in_flight": choices, "tenant_share": 1}
    async with serving(engine) as endpoint, running(folder, endpoint, **settings) as started:
        client, service, _ = started
        client.headers.update(HEADERS)
        with pytest.MonkeyPatch.context() as patch:
            # Do not repeat stop requests, as a busy machine may be slower than the first repeat.
            patch.setattr("gateway.triton.stop_requests._PAUSES_S", ())
            yield Case(engine, client, service, log, clock, choices)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", sorted(set(get_args(Fault)) - {"slow"}))
@pytest.mark.parametrize(("transport", "choices"), [("http2", 1), ("http2", 3), ("grpcio", 1)])
async def test_one_end_whatever_breaks_wherever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    choices: int,
    fault: Fault,
    stream: bool,
) -> None:
    monkeypatch.setenv("GATEWAY_TRITON_TRANSPORT", transport)
    async with case(tmp_path, fault, choices) as it:
        step, stalled = 0, list[str]()
        while True:
            it.engine.step, it.engine.reached, before = step, 0, len(it.engine.requests)
            answer = await it.ask(stream=stream)
            reached = it.engine.reached > 0
            broken = _breaks(fault, step) and reached
            error, texts = _read(answer, choices, whole=not stream)
            assert (error is not None) is broken
            if broken:
                assert error == ("timeout" if fault == "stall" else _CODES[fault])
                assert not any(words in answer.text for words in ("reset", "Maximum queue"))
                if answer.status_code != 200:
                    retry = "false" if fault == "stall" else "true"
                    assert answer.headers["x-should-retry"] == retry
                if stream and choices == 1:
                    assert texts.get(0, "") == TEXT[:step]
            else:
                assert texts == dict.fromkeys(range(choices), _text(fault, step, reached))
            stalled += [r.id for r in it.engine.requests[before:] if fault == "stall" and reached]
            await it.wait_settled(2 * step + 1)
            record = it.records()[-1]
            assert record["status"] == (200 if not broken else 504 if fault == "stall" else 503)
            if not broken:
                assert record["completion_tokens"] == choices * len(_text(fault, step, reached))
            elif choices == 1:
                assert record["completion_tokens"] == step
            await it.ask_again()
            await it.wait_settled(2 * step + 2)
            step += 1
            if not reached:
                break
        assert step == len(TEXT) + 1
        if fault == "stall":
            assert metric_of(it.service, "gateway_stops_total", reason="timeout") == len(stalled)
        stops = it.engine.stops
    # The gateway is closed, so all stop requests were sent. Each open stream got only one.
    if fault == "stall" or choices == 1:
        assert sorted(stops) == sorted(stalled)
    else:
        assert max(Counter(stops).values(), default=1) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_leaves_at_every_step(
    tmp_path: Path, choices: int, stream: bool
) -> None:
    async with case(tmp_path, "stall", choices) as it:
        for step in range(len(TEXT)):
            it.engine.step, it.engine.reached = step, 0
            leaver = asyncio.create_task(
                it.client.post("/v1/completions", json=it.body(stream=stream))
            )
            # Wait until the engine has sent all tokens before the stall, and the gateway has read
            # them: the answer to `refresh` follows the tokens on the same connection.
            while it.engine.reached < choices:
                await asyncio.sleep(0.01)
            for replica in it.service.replicas:
                await replica.engine.refresh()
            leaver.cancel()
            await it.wait_settled(2 * step + 1)
            record = it.records()[-1]
            assert (record["status"], record["completion_tokens"]) == (499, step * choices)
            stops = metric_of(it.service, "gateway_stops_total", reason="disconnect")
            assert stops == len(it.engine.requests) - step * choices
            await it.ask_again()
        asked = [request.id for request in it.engine.requests]
    assert len(it.engine.stops) == len(set(it.engine.stops)) == len(TEXT) * choices
    assert set(it.engine.stops) < set(asked)


_CODES = {
    "error": "overloaded",
    "abort": "engine_unavailable",
    "truncate": "engine_unavailable",
    "drop": "engine_unavailable",
}


def _breaks(fault: Fault, step: int) -> bool:
    """Return True if the gateway can detect the fault: it cannot detect a lost or doubled token."""
    return fault != "duplicate" and not (fault == "drop" and step < len(TEXT) - 1)


def _text(fault: Fault, step: int, reached: bool) -> str:
    if not reached or step == len(TEXT) - 1:
        return TEXT
    letters = {"drop": "", "duplicate": 2 * TEXT[step]}
    return TEXT[:step] + letters.get(fault, TEXT[step]) + TEXT[step + 1 :]


def _read(
    answer: httpx.Response, choices: int, *, whole: bool
) -> tuple[str | None, dict[int, str]]:
    """Return the error's code or None, and the texts. Assert that the answer has only one end."""
    if whole or answer.status_code != 200:
        parsed = answer.json()
        if answer.status_code != 200:
            assert set(parsed) == {"error"}
            return parsed["error"]["code"], {}
        assert all(choice["finish_reason"] for choice in parsed["choices"])
        return None, {choice["index"]: choice["text"] for choice in parsed["choices"]}
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    frames = [json.loads(event.removeprefix("data: ")) for event in events]
    errors = [frame["error"]["code"] for frame in frames if "error" in frame]
    texts: dict[int, str] = {}
    finished: Counter[int] = Counter()
    for frame in frames:
        for choice in frame.get("choices", []):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            finished[choice["index"]] += choice["finish_reason"] is not None
    if errors:
        assert len(errors) == 1
        assert "error" in frames[-1]
        assert max(finished.values(), default=0) <= 1
        return errors[0], texts
    assert finished == dict.fromkeys(range(choices), 1)
    return None, texts
