"""Concurrency limits of lookups, deletions and followed streams, which no rate limit counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from gateway.api.responses import looks as looks_module
from gateway.api.responses import retrieval
from gateway.api.responses import unfinished as unfinished_module
from gateway.api.responses.progress import beat_record
from gateway.api.responses.unfinished import UnfinishedResponses
from gateway.conversations.record import Record
from gateway.errors import Overloaded
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import running, save_tokenizer

_KEYS = {"hostile": "sk-the-key-of-hostile", "other": "sk-the-key-of-other"}
_SLOTS, _WAITING, _FOLLOWERS = 4, 256, 64
_RESPONSE = f"/v1/responses/resp_{'0' * 32}"
_CONVERSATION = f"/v1/conversations/conv_{'0' * 32}"


def _as(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {_KEYS[name]}"}


class _SlowStore:
    """Reads of a store that block for the tenant `hostile` until the test sets `free`."""

    def __init__(self, store: Any) -> None:
        self._get = store.get
        self.asked: Counter[str] = Counter()
        self.free = asyncio.Event()

    async def get(self, tenant: str, ids: Any, **more: Any) -> Any:
        self.asked[tenant] += 1
        if tenant == "hostile":
            await self.free.wait()
        return await self._get(tenant, ids, **more)


@contextlib.asynccontextmanager
async def _gateway(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[httpx.AsyncClient, _SlowStore]]:
    save_tokenizer(folder)
    config = write_config(folder / "c.yaml", *[tenant(name, key) for name, key in _KEYS.items()])
    async with running(folder, "127.0.0.1:1", ready=False, config=config) as (client, service, _):
        slow = _SlowStore(service.conversations)
        monkeypatch.setattr(service.conversations, "get", slow.get)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, limits=limits, timeout=60) as many:
            yield many, slow


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", _RESPONSE),
        ("GET", f"{_RESPONSE}?stream=true"),
        ("DELETE", _RESPONSE),
        ("POST", f"{_RESPONSE}/cancel"),
        ("GET", f"{_RESPONSE}/input_items"),
        ("GET", _CONVERSATION),
        ("GET", f"{_CONVERSATION}/items"),
        ("GET", f"{_CONVERSATION}/items/msg_1"),
        ("DELETE", _CONVERSATION),
        ("DELETE", f"{_CONVERSATION}/items/msg_1"),
    ],
)
async def test_few_lookups_of_a_tenant_run_and_a_bounded_number_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    waiting, more = 16, 4
    monkeypatch.setattr(looks_module, "_MAX_WAITING_LOOKUPS", waiting)
    async with _gateway(tmp_path, monkeypatch) as (client, slow):
        asked = [
            asyncio.create_task(client.request(method, path, headers=_as("hostile")))
            for _ in range(_SLOTS + waiting + more)
        ]
        refused: list[asyncio.Task[httpx.Response]] = []
        while len(refused) < more:
            await asyncio.wait(
                [task for task in asked if not task.done()], return_when=asyncio.FIRST_COMPLETED
            )
            refused = [task for task in asked if task.done()]
        for task in refused:
            response = task.result()
            assert response.status_code == 503, response.text
            message = response.json()["error"]["message"]
            assert f"{waiting} lookups" in message
            assert f"allowed: {waiting}" in message
        assert slow.asked["hostile"] == _SLOTS
        # Other tenants do not wait for these lookups.
        assert (await client.request(method, path, headers=_as("other"))).status_code == 404
        slow.free.set()
        found = Counter([(await task).status_code for task in asked])
        assert found == {404: _SLOTS + waiting, 503: more}
        assert (await client.request(method, path, headers=_as("hostile"))).status_code == 404


async def test_who_leaves_while_it_waits_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = looks_module.TenantLookups()

    async def look() -> None:
        async with lookups:
            await asyncio.sleep(3600)

    tasks = [asyncio.create_task(look()) for _ in range(_SLOTS + _WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await lookups.__aenter__()
    for task in tasks[_SLOTS:]:
        task.cancel()
    await asyncio.wait(tasks[_SLOTS:])
    for task in tasks[:_SLOTS]:
        task.cancel()
    await asyncio.wait(tasks)
    for _ in range(_SLOTS):
        await lookups.__aenter__()


async def test_streams_of_a_tenant_share_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[asyncio.Semaphore] = []

    async def replay(
        _tenant: str, _id: str, _place: int, slots: asyncio.Semaphore, _body: object
    ) -> None:
        given.append(slots)

    monkeypatch.setattr(retrieval, "EventStream", lambda write, *_: write)
    state = SimpleNamespace(
        unfinished=SimpleNamespace(replay=replay), read_limiter=looks_module.TenantReadLimiter()
    )
    service = SimpleNamespace(settings=SimpleNamespace(keep_alive=15.0))
    monkeypatch.setattr(retrieval, "service_of", lambda _: service)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state), scope={})
    for write in [retrieval.stream_events(request, "t", "resp_1", 0, {}) for _ in range(2)]:
        await cast("Any", write)(_Body())
    first, second = given
    assert first is second is state.read_limiter.for_tenant("t").slots


class _Store:
    """A store with a response that another worker is generating."""

    async def members(self, *_: Any, after: int, **__: Any) -> list[Record]:
        return [Record("resp_1/1", b"event: x\n\n", 1, "resp_1", 1)] if after < 1 else []

    async def get(self, *_: Any, **__: Any) -> list[Record]:
        return [beat_record("resp_1", "in_progress")]


class _Body:
    def start_keep_alive(self) -> None: ...

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


@pytest.mark.parametrize(("followers", "interval_s"), [(1, 0.25), (8, 0.25), (_FOLLOWERS, 2.0)])
async def test_streams_that_follow_responses_of_other_workers_ask_at_a_bounded_rate(
    monkeypatch: pytest.MonkeyPatch, followers: int, interval_s: float
) -> None:
    """All streams of a tenant poll at most 32 times a second together. A 65th stream is refused."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    clock = SimpleNamespace(sleep=sleep, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(unfinished_module, "asyncio", clock)
    settings = SimpleNamespace(keep_alive=15.0)
    service: Any = SimpleNamespace(conversations=_Store(), settings=settings)
    unfinished = UnfinishedResponses(service, {})
    slots, body = looks_module.TenantLookups().slots, cast("Any", _Body())
    tasks = [
        asyncio.create_task(unfinished.replay("t", "resp_1", 0, slots, body))
        for _ in range(followers)
    ]
    while len(slept) < 5 * followers:
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
    assert set(slept[-followers:]) == {interval_s}
    assert sum([1 / seconds for seconds in slept[-followers:]]) <= 32
    if followers == _FOLLOWERS:
        with pytest.raises(Overloaded, match="allowed: 64"):
            await unfinished.replay("t", "resp_1", 0, slots, body)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not unfinished._followers
