"""Requests to a busy event loop: which are answered, which wait, and which are refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.scheduling import start_queue
from gateway.scheduling.start_queue import MAX_TURN_WORK
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

KEYS = {"flood": "sk-key-of-flood", "other": "sk-key-of-other", "third": "sk-key-of-third"}
ADMIN = "sk-admin-key-of-thirty-two-letters"
COMPLETIONS = "/v1/completions"
SLOW_TURN_S = 0.2

Asked = asyncio.Task[httpx.Response]


@dataclass
class BusyGateway:
    """A gateway whose start queue advances only if a test calls `turn`, by a simulated clock."""

    client: httpx.AsyncClient
    service: Any
    engine: FakeTriton
    order: list[str] = field(default_factory=list)
    now: float = 0.0
    planned: list[Callable[[], None]] = field(default_factory=list)

    def ask(
        self, name: str, url: str = COMPLETIONS, **headers: str
    ) -> asyncio.Task[httpx.Response]:
        body: dict[str, Any] = {"model": "m", "max_tokens": 2}
        if url == COMPLETIONS:
            body["prompt"] = "x"
        else:
            body["messages"] = [{"role": "user", "content": "x"}]
        key = KEYS.get(name, name)
        headers |= {"authorization": f"Bearer {key}"}
        task = asyncio.create_task(self.client.post(url, json=body, headers=headers, timeout=120))
        task.add_done_callback(lambda _: self.order.append(name))
        return task

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not holds():
                await asyncio.sleep(0)

    def turn(self, seconds: float = SLOW_TURN_S) -> None:
        self.now += seconds
        planned, self.planned[:] = list(self.planned), []
        for callback in planned:
            callback()

    async def go_on(self, *asked: Asked) -> list[httpx.Response]:
        """Run turns until all requests are answered. Return the responses."""
        while not all(task.done() for task in asked):
            self.turn(0.001)
            await asyncio.sleep(0.001)
        return [task.result() for task in asked]

    async def fill_turn(self, name: str) -> list[Asked]:
        """Send as many requests as one turn begins, and wait for their answers."""
        asked = [self.ask(name) for _ in range(MAX_TURN_WORK)]
        await asyncio.gather(*asked)
        return asked

    async def overload(self, name: str) -> list[Asked]:
        """Send a tenant's requests between slow turns until some get 503. Return their tasks."""
        await self.fill_turn(name)
        asked: list[Asked] = []

        def is_settled() -> bool:
            return self.service.starts.waiting + sum(task.done() for task in asked) >= len(asked)

        while True:
            asked += [self.ask(name) for _ in range(2 * MAX_TURN_WORK)]
            await self.until(is_settled)
            if any(task.done() and task.result().status_code == 503 for task in asked):
                return asked
            self.turn()

    def refused(self, name: str) -> float:
        labels = {"tenant": name, "cause": "core_busy"}
        return metric_of(self.service, "gateway_queue_refusals_total", **labels)


@asynccontextmanager
async def busy_gateway(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[BusyGateway]:
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "!", "chat_template": "{{ messages[0].content }}"}'
    )
    engine = FakeTriton(tokens=ids_of(folder, "ab"), fault=None, step=0)
    config = write_config(folder / "c.yaml", *[tenant(name, key) for name, key in KEYS.items()])
    async with (
        serving(engine) as endpoint,
        running(folder, endpoint, config=config, admin_key=ADMIN, **settings) as started,
    ):
        client, service, _ = started
        client._transport._pool._max_connections = 10_000
        gateway = BusyGateway(client, service, engine)
        monkeypatch.setattr(service.starts, "_call_soon", gateway.planned.append)
        monkeypatch.setattr(service.starts, "_clock", lambda: gateway.now)
        yield gateway
        monkeypatch.undo()
        for callback in gateway.planned:
            callback()


async def test_what_waits_begins_in_turn_by_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_gateway(tmp_path, monkeypatch) as it:
        await it.fill_turn("flood")
        flood = [it.ask("flood") for _ in range(3 * MAX_TURN_WORK)]
        await it.until(lambda: it.service.starts.waiting == len(flood))
        others = [it.ask(name) for name in ("other", "third")]
        await it.until(lambda: it.service.starts.waiting == len(flood) + 2)
        assert not any(task.done() for task in (*flood, *others))
        it.turn()
        answers = await asyncio.gather(*others)
        assert {answer.status_code for answer in answers} == {200}
        assert it.service.starts.waiting == 2 * MAX_TURN_WORK + 2
        answers = await it.go_on(*flood)
        assert {answer.status_code for answer in answers} == {200}


async def test_a_flood_is_refused_at_once_and_other_tenants_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_gateway(tmp_path, monkeypatch) as it:
        asked = await it.overload("flood")
        await it.until(lambda: it.refused("flood") > 0)
        refused = [t.result() for t in asked if t.done() and t.result().status_code == 503]
        told = refused[0].json()["error"]
        assert (told["code"], told["type"]) == ("overloaded", "server_error")
        assert 1 <= int(refused[0].headers["retry-after"]) <= 3
        assert refused[0].headers["x-should-retry"] == "true"
        assert refused[0].headers["x-request-id"]
        # Refused requests never reach the engine, and count as refusals of their own tenant only.
        others = [it.ask("other", headers) for headers in (COMPLETIONS, "/v1/chat/completions")]
        answers = await it.go_on(*others, *asked)
        assert {answer.status_code for answer in answers[:2]} == {200}
        assert it.refused("other") == 0
        served = Counter(answer.status_code for answer in answers)[200]
        assert len(it.engine.requests) == served + MAX_TURN_WORK
        assert it.service.monitor.demand.refused["flood"]["core_busy"] == len(refused)
        assert metric_of(
            it.service, "gateway_requests_total", path=COMPLETIONS, status="503"
        ) == len(refused)


async def test_health_metrics_and_admins_are_answered_during_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with busy_gateway(tmp_path, monkeypatch) as it:
        asked = await it.overload("flood")
        admin = {"authorization": f"Bearer {ADMIN}"}
        for path in ("/health/live", "/health/ready", "/v1/models", "/v1/adapters", "/metrics"):
            answer = await it.client.get(path, headers=admin)
            assert answer.status_code in (200, 401), path
            assert answer.status_code == 200 or path == "/v1/models"
        waiting = it.service.starts.waiting
        assert waiting
        metrics = (await it.client.get("/metrics", headers=admin)).text
        assert f"gateway_requests_waiting_to_begin {waiting}.0" in metrics
        # Operators are notified of the overload, too.
        await it.until(lambda: "busy" in it.service.troubles.facts())
        await it.go_on(*asked)
        # The overload has one line in the log. Its refusals have none.
        assert caplog.text.count("THE GATEWAY'S OWN CORE IS BUSY") == 1


async def test_strangers_wait_and_are_refused_among_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 64
    async with busy_gateway(tmp_path, monkeypatch) as it:
        monkeypatch.setattr(start_queue, "MAX_WAITING", most)
        await it.fill_turn("other")
        asked = [it.ask("sk-wrong") for _ in range(most + 8)]
        await it.until(lambda: sum(task.done() for task in asked) == 8)
        assert {task.result().status_code for task in asked if task.done()} == {503}
        mine = it.ask("other")
        await it.until(lambda: it.service.starts.waiting == most + 1)
        it.turn()
        assert (await mine).status_code == 200
        answers = await it.go_on(*asked)
        assert Counter(answer.status_code for answer in answers) == {401: most, 503: 8}


async def test_each_protocol_and_pages_of_browsers_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = "https://chat.example"
    async with busy_gateway(tmp_path, monkeypatch, cors_origins=[origin]) as it:
        asked = await it.overload("flood")
        answer = await it.ask("flood", "/v1/messages", origin=origin, **{"x-request-id": "mine"})
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["access-control-allow-origin"] == origin
        other = await it.ask("flood", origin="https://other.example")
        assert "access-control-allow-origin" not in other.headers
        await it.go_on(*asked)


async def test_a_refused_connection_goes_on_and_its_body_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_gateway(tmp_path, monkeypatch) as it:
        asked = await it.overload("flood")
        port = it.client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['flood']}\r\n"
            "content-length: 200000\r\n\r\n"
        )
        writer.write(head.encode() + b"x" * 70_000)
        assert b" 503 " in await reader.readuntil(b"\r\n\r\n")
        assert b"overloaded" in await reader.readuntil(b"}}")
        writer.write(b"x" * 130_000 + b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await it.go_on(*asked)


async def test_who_leaves_while_waiting_is_not_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_gateway(tmp_path, monkeypatch) as it:
        await it.fill_turn("flood")
        asked = [it.ask("flood") for _ in range(4)]
        await it.until(lambda: it.service.starts.waiting == 4)
        connections = it.service.starts
        for task in asked[:3]:
            task.cancel()
        await asyncio.gather(*asked[:3], return_exceptions=True)
        # Wait, as the server notices a closed connection only after it has handled earlier reads.
        for _ in range(100):
            await asyncio.sleep(0.001)
        it.turn()
        assert (await asked[3]).status_code == 200
        assert len(it.engine.requests) == MAX_TURN_WORK + 1
        assert not connections.waiting


@pytest.mark.parametrize("connections", [200])
async def test_a_burst_on_as_many_connections_is_served_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    """A burst is served without a refusal, with the event loop's real turns."""
    async with busy_gateway(tmp_path, monkeypatch) as it:
        monkeypatch.undo()
        answers = await asyncio.gather(*[it.ask("flood") for _ in range(connections)])
        assert {answer.status_code for answer in answers} == {200}
