"""More connections than a process accepts: which are closed, and which requests are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.http.connections import RESERVED_CONNECTIONS, Connections
from gateway.http.server import Server
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import metric_of, running, save_tokenizer
from tests.support.patience import PATIENCE_S
from tests.support.raw_http import HOST, answers, post

pytestmark = pytest.mark.slow

LIVE = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
ASKED = {"model": "m", "prompt": "x", "max_tokens": 2}
HANGS_AFTER_S = 300

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class World:
    """A gateway with a low connection limit, and an engine that can delay its answers."""

    def __init__(self, fake: FakeTriton, client: httpx.AsyncClient, service: Any, server: Server):
        self.fake = fake
        self.service = service
        self.server = server
        self.port = client.base_url.port or 0
        self._opened: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes = b"", address: str | None = None) -> Streams:
        own = None if address is None else (address, 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=own)
        self._opened.append(writer)
        writer.write(data)
        return reader, writer

    async def ask(self, path: str, *, port: int | None = None, address: str = "") -> httpx.Response:
        """Send a completion or a GET on a new connection, and return the answer."""
        transport = httpx.AsyncHTTPTransport(local_address=address or None)
        url = f"http://127.0.0.1:{port or self.port}{path}"
        async with httpx.AsyncClient(transport=transport, timeout=HANGS_AFTER_S) as client:
            if path == "/v1/completions":
                return await client.post(url, json=ASKED)
            return await client.get(url)

    async def busy(self, count: int) -> list[asyncio.Task[httpx.Response]]:
        """Return `count` requests that the engine has received and not answered yet."""
        tasks = [asyncio.create_task(self.ask("/v1/completions")) for _ in range(count)]
        await self.until(lambda: len(self.fake.requests) == count)
        return tasks

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_AFTER_S):
            while not holds():
                await asyncio.sleep(0.01)

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def hang_up(self) -> None:
        for writer in self._opened:
            writer.close()


@asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    save_tokenizer(folder)
    fake = FakeTriton(tokens=[65, 66], fault="slow", step=0)
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(serving(fake))
        found = await stack.enter_async_context(running(folder, endpoint, **settings))
        here = World(fake, *found)
        stack.callback(here.hang_up)
        stack.callback(fake.released.set)
        yield here


async def test_idle_connections_lock_nobody_out(tmp_path: Path) -> None:
    """Check that the oldest idle connections are closed, and the newest stay open."""
    limit, many = 20, 200
    async with world(tmp_path, max_connections=limit) as here:
        here.fake.released.set()
        idle = []
        for _ in range(many):
            reader, writer = await here.connect(LIVE)
            assert b" 200 " in await reader.readuntil(b"}")
            idle.append((reader, writer))
        assert here.connections <= limit + RESERVED_CONNECTIONS
        for path in ("/health/live", "/health/ready", "/metrics", "/v1/models", "/v1/completions"):
            assert (await here.ask(path)).status_code == 200
        assert here.connections <= limit + RESERVED_CONNECTIONS
        oldest, newest = idle[:20], idle[-20:]
        assert [await reader.read() for reader, _ in oldest] == [b""] * len(oldest)
        for reader, writer in newest:
            writer.write(LIVE)
            assert b" 200 " in await reader.readuntil(b"}")


@pytest.mark.parametrize("data", [b"", LIVE[:-2]], ids=["silent", "half a head"])
async def test_what_never_asks_locks_nobody_out(tmp_path: Path, data: bytes) -> None:
    async with world(tmp_path, max_connections=2) as here:
        here.fake.released.set()
        for _ in range(2 + RESERVED_CONNECTIONS + 20):
            await here.connect(data)
        assert (await here.ask("/v1/completions")).status_code == 200
        assert here.connections <= 2 + RESERVED_CONNECTIONS


async def test_health_metrics_and_admins_are_answered_while_all_are_busy(tmp_path: Path) -> None:
    limit = 3
    async with world(tmp_path, max_connections=limit, admin_port=0) as here:
        admin_port = here.server.servers[1].sockets[0].getsockname()[1]
        busy = await here.busy(limit)
        # Silent connections do not use up the connections reserved for probes.
        silent = [await here.connect() for _ in range(RESERVED_CONNECTIONS + 20)]
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{here.port}", timeout=PATIENCE_S
        ) as client:
            for path in ("/v1/completions", "/tokenize"):
                refused = await client.post(path, json=ASKED)
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                assert refused.headers["x-request-id"]
                assert refused.json()["error"]["code"] == "overloaded"
            assert (await here.ask("/v1/models")).status_code == 503
            assert (await here.ask("/health/live")).status_code == 200
            assert (await here.ask("/health/ready")).status_code == 200
            metrics = await here.ask("/metrics", port=admin_port)
            assert 'path="no room",status="503"' in metrics.text
            assert (await here.ask("/v1/adapters", port=admin_port)).status_code == 403
            assert here.connections <= limit + RESERVED_CONNECTIONS
            here.fake.released.set()
            assert [(await task).status_code for task in busy] == [200] * limit
            # The connection of the refused request is still open.
            assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
        assert len(silent) == RESERVED_CONNECTIONS + 20


async def test_requests_that_come_slowly_give_way(tmp_path: Path) -> None:
    """Check requests with a complete head and no byte of their body."""
    limit = 3
    head = post("/v1/completions", b"x" * 1000)[:-1000]
    async with world(tmp_path, max_connections=limit) as here:
        here.fake.released.set()
        slow = [await here.connect(head) for _ in range(limit)]
        await here.until(lambda: here.connections == limit)
        first = await here.ask("/v1/completions")
        assert first.status_code == 503, "they may be slow for a moment"
        async with asyncio.timeout(HANGS_AFTER_S):
            while (await here.ask("/v1/completions")).status_code != 200:
                await asyncio.sleep(0.2)
        reading = [asyncio.create_task(reader.read()) for reader, _ in slow]
        done, left = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        [answer] = answers(done.pop().result())
        assert answer.status == 503
        assert json.loads(answer.body)["error"]["code"] == "overloaded"
        assert here.connections == limit - 1, "one is enough"
    assert metric_of(here.service, "gateway_generations_in_flight") == 0


@asynccontextmanager
async def _no_room_for_bodies(here: World) -> AsyncIterator[bytes]:
    """Use up the byte budget for large bodies.

    Yield the start of another large request, which fills the gateway's read buffer.
    """
    most = here.service.settings.max_body_bytes
    async with AsyncExitStack() as stack:
        for number in range(4):
            await stack.enter_async_context(here.service.body_budget.permit(str(number), cost=most))
        head = post("/v1/completions", b"").replace(b"length: 0", b"length: %d" % most)
        yield head + b"x" * 2**20


async def test_bodies_that_wait_for_room_give_way(tmp_path: Path) -> None:
    """Check that a queued body gives way, though the gateway has paused reading it."""
    limit = 3
    async with world(tmp_path, max_connections=limit) as here, _no_room_for_bodies(here) as large:
        here.fake.released.set()
        held = [await here.connect(large) for _ in range(limit)]
        await here.until(lambda: here.service.body_budget.waiting == limit)
        async with asyncio.timeout(HANGS_AFTER_S):
            while (await here.ask("/v1/completions")).status_code != 200:
                await asyncio.sleep(0.2)
        await here.until(lambda: here.connections < limit)
        assert here.service.body_budget.waiting == here.connections == limit - 1, "one is enough"
        assert len(held) == limit


async def test_few_bodies_of_a_tenant_wait_for_room(tmp_path: Path) -> None:
    most, more = 32, 5
    async with world(tmp_path) as here, _no_room_for_bodies(here) as large:
        held = [await here.connect(large) for _ in range(most)]
        await here.until(lambda: here.service.body_budget.waiting == most)
        for _ in range(more):
            reader, writer = await here.connect(large)
            async with asyncio.timeout(HANGS_AFTER_S):
                head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            writer.close()
        assert here.service.body_budget.waiting == len(held)


async def test_an_address_has_a_bound_of_its_own(tmp_path: Path) -> None:
    bound = 2
    async with world(tmp_path, max_connections_per_address=bound) as here:
        here.fake.released.set()
        held = [await here.connect() for _ in range(bound)]
        assert (await here.ask("/v1/completions")).status_code == 503
        assert (await here.ask("/health/live")).status_code == 200
        assert (await here.ask("/v1/completions", address="127.0.0.2")).status_code == 200
        # Once the reserved connections are used up too, the next one is refused unread.
        held += [await here.connect() for _ in range(RESERVED_CONNECTIONS)]
        reader, _ = await here.connect()
        [answer] = answers(await reader.read())
        assert answer.status == 503
        for _, writer in held:
            writer.close()
        await here.until(lambda: here.connections == 0)
        assert (await here.ask("/v1/completions")).status_code == 200


class _Client:
    """A connection with nothing but an address."""

    is_slow = False

    def __init__(self, address: str | None) -> None:
        self.address = address

    def abort(self) -> None:
        raise AssertionError

    evict = abort


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        (None, None, False),
    ],
)
def test_what_counts_as_one_address(one: str | None, other: str | None, same: bool) -> None:
    connections = Connections(10, of_address=1)
    first, second = _Client(one), _Client(other)
    assert connections.add(first)
    assert connections.add(second)
    assert connections.begin(second) is not same
    connections.remove(first)
    connections.remove(second)
    assert connections.add(first)
    assert connections.begin(first)
