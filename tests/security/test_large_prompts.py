"""Prompts of megabytes: their CPU time, their memory, and the delay for other tenants."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cpu import costs_less_than
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.in_process import running, save_tokenizer
from tests.support.local_stack import Stack
from tests.support.raw_http import post

pytestmark = pytest.mark.slow

MEGABYTE = 2**20
HANGS_AFTER_S = 300
TEXT = "The capital of France is Paris. "
HUGE = TEXT * (8 * 10**6 // len(TEXT))
KEYS = {"flood": "sk-flood-key", "small": "sk-small-key"}
FLOOD, SMALL = ({"authorization": f"Bearer {key}"} for key in KEYS.values())


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        ("/v1/completions", "prompt", {"prompt": HUGE}),
        ("/v1/completions", "prompt", {"prompt": HUGE, "truncate_prompt_tokens": 10**6}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/tokenize", "prompt", {"prompt": HUGE}),
        ("/tokenize", "messages", {"messages": [{"role": "user", "content": HUGE}]}),
    ],
)
def test_what_cannot_fit_is_not_tokenized(
    stack: Stack, path: str, param: str, fields: dict[str, Any]
) -> None:
    """Check that a prompt that exceeds the context is refused by its size. Tokenizing takes some 4
    s.
    """
    content = json.dumps({"model": "demo", **fields})
    with costs_less_than(1.0, stack.pids["gateway"]):
        answer = httpx.post(stack.gateway + path, content=content, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        param,
    )
    assert "maximum context length is" in error["message"]


def test_of_a_truncated_prompt_only_the_end_is_tokenized(stack: Stack) -> None:
    fields = {**body(), "truncate_prompt_tokens": 5, "return_token_ids": True, "echo": True}
    found = []
    for text in (HUGE, TEXT * 100):
        with costs_less_than(1.0, stack.pids["gateway"]):
            answer = httpx.post(
                f"{stack.gateway}/v1/completions", json={**fields, "prompt": text}, timeout=60
            )
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0])
    assert found[0] == found[1]


def test_memory_of_large_bodies_is_bounded_and_comes_back(stack: Stack, tmp_path: Path) -> None:
    """Check 64 concurrent bodies. A client closes when it has sent its body or is refused."""
    config = write_config(tmp_path / "c.yaml", *[tenant(*pair) for pair in KEYS.items()])
    content = json.dumps(body(prompt=HUGE)).encode()
    request = post("/v1/completions", content, f"authorization: Bearer {KEYS['flood']}".encode())
    with GatewayProcess(tmp_path / "g", stack, config=config) as gateway:
        with gateway.client(KEYS["small"]) as client:
            assert client.post("/v1/completions", json=body()).status_code == 200
            memory = psutil.Process(gateway.process.pid).memory_info
            before = most = memory().rss
            connections = []
            for _ in range(64):
                connection = socket.create_connection(("127.0.0.1", gateway.port))
                connection.setblocking(False)
                connections.append((connection, memoryview(request)))
            while connections:
                most = max(most, memory().rss)
                connections = [each for each in map(_sent, connections) if each is not None]
                time.sleep(0.01)
            assert client.post("/v1/completions", json=body()).status_code == 200
        # The gateway may still process the last bodies.
        deadline = time.monotonic() + 60
        while memory().rss > before + 50 * MEGABYTE and time.monotonic() < deadline:
            time.sleep(0.1)
        assert memory().rss <= before + 50 * MEGABYTE
    assert most < 400 * MEGABYTE


def _sent(
    state: tuple[socket.socket, memoryview],
) -> tuple[socket.socket, memoryview] | None:
    """Send what the socket accepts. Return the rest, or close the connection and return None."""
    connection, left = state
    try:
        left = left[connection.send(left[: 2**18]) :]
    except BlockingIOError:
        return connection, left
    except OSError:  # the gateway refused and closed
        left = left[:0]
    if left:
        return connection, left
    connection.close()
    return None


@asynccontextmanager
async def _endless(folder: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """Yield a gateway with two tenants, whose model accepts prompts of any length."""
    save_tokenizer(folder)
    config = write_config(folder / "c.yaml", *[tenant(*pair) for pair in KEYS.items()])
    fake = FakeTriton(tokens=[60], fault=None, step=0)
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(serving(fake))
        settings = {"config": config, "max_seq_len": 10**9, **settings}
        client, service, _ = await stack.enter_async_context(running(folder, endpoint, **settings))
        client.timeout = httpx.Timeout(120)
        yield client, service


def _watch(service: Any) -> tuple[list[tuple[str, str]], threading.Event]:
    """Record the tokenization jobs from now on.

    Return a list of (`asked` or `begun`, tenant), and an event. Jobs that have begun wait for the
    event, so that no thread finishes before other tenants have asked.
    """
    seen: list[tuple[str, str]] = []
    free = threading.Event()
    run = service.prompts.threads.run

    async def watched(tenant: str, chars: int, work: Callable[[], Any]) -> Any:
        def begun() -> Any:
            seen.append(("begun", tenant))
            assert free.wait(HANGS_AFTER_S)
            return work()

        seen.append(("asked", tenant))
        return await run(tenant, chars, begun)

    service.prompts.threads.run = watched
    return seen, free


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANGS_AFTER_S):
        while not holds():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("chars", [5000, 400_000])
async def test_one_text_of_the_flood_is_before_that_of_another(tmp_path: Path, chars: int) -> None:
    """Check that a small tenant waits for at most one more text of the flood."""
    async with _endless(tmp_path) as (client, service):
        seen, free = _watch(service)

        def ask(headers: dict[str, str], chars: int) -> asyncio.Task[httpx.Response]:
            fields = {"prompt": "x" * chars}
            return asyncio.create_task(client.post("/tokenize", json=fields, headers=headers))

        books = [ask(FLOOD, 400_000) for _ in range(12)]
        await _until(lambda: seen.count(("asked", "flood")) >= 8)
        small = ask(SMALL, chars)
        await _until(lambda: ("asked", "small") in seen)
        free.set()
        answers = await asyncio.gather(small, *books)
        assert {answer.status_code for answer in answers} == {200}
        asked = seen.index(("asked", "small"))
        waited = seen[asked : seen.index(("begun", "small"))]
        assert waited.count(("begun", "flood")) <= 1
        assert seen[asked:].count(("begun", "flood")) > 5, "the flood was over before"


async def test_clients_that_left_are_not_worked_for(tmp_path: Path) -> None:
    """Check that of twenty cancelled requests only the running one is tokenized."""
    async with _endless(tmp_path) as (client, service):
        seen, free = _watch(service)
        request = {"json": {"prompt": "x" * 400_000}, "headers": FLOOD}
        flood = [asyncio.create_task(client.post("/tokenize", **request)) for _ in range(20)]
        await _until(lambda: seen.count(("asked", "flood")) >= 8)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        # All cancelled requests have left the queues, except for the one that runs.
        bodies, turns = service.body_budget, service.prompts.threads.long
        await _until(lambda: not (turns.waiting_chars or bodies.waiting or bodies.in_flight))
        free.set()
        answer = await client.post("/tokenize", **request | {"headers": SMALL})
        assert answer.status_code == 200
        await _until(lambda: not bodies.in_flight)
        assert seen.count(("begun", "flood")) == 1
        assert turns.waiting_chars == bodies.waiting == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_one_too_many_is_refused_before_its_body_is_read(tmp_path: Path, path: str) -> None:
    """Check that a second request gets 429 from its headers alone. The invalid first one counts."""
    save_tokenizer(tmp_path)
    limited = tenant("small", KEYS["small"], requests_per_minute=1)
    config = write_config(tmp_path / "limited.yaml", limited)
    async with _endless(tmp_path, config=config) as (client, _):
        assert (await client.post(path, content=b"nothing", headers=SMALL)).status_code == 400
        head = post(path, b"", f"authorization: Bearer {KEYS['small']}".encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(head.replace(b"length: 0", b"length: 8000000"))
        async with asyncio.timeout(300):
            answer = await reader.readuntil(b"\r\n")
        assert answer.startswith(b"HTTP/1.1 429 ")
        writer.close()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_what_asks_no_engine_is_counted_too(tmp_path: Path, path: str) -> None:
    save_tokenizer(tmp_path)
    limited = tenant("small", KEYS["small"], requests_per_minute=2)
    config = write_config(tmp_path / "limited.yaml", limited)
    async with _endless(tmp_path, config=config) as (client, _):
        fields = {"prompt": "Hi"} if path == "/tokenize" else {"tokens": [1]}
        for status in (200, 200, 429):
            answer = await client.post(path, json=fields, headers=SMALL)
            assert answer.status_code == status
        # The limit is checked before the body.
        answer = await client.post(path, content=b"nothing", headers=SMALL)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
