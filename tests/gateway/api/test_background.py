"""Background responses in a gateway of several workers, with pauses at chosen steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import orjson
import pytest

from gateway.api.responses.progress import POLL_INTERVAL_S, StoredEvents, beat_id
from gateway.conversations.record import MAX_MEMBERS, Record
from gateway.conversations.store import Conversations
from gateway.errors import ConversationTooLarge
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

TEXT = "some words that come one by one"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextlib.asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[tuple[FakeTriton, str]]:
    """Yield an engine and its endpoint. The engine waits before its last token until released."""
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokens = ids_of(folder, TEXT)
    engine = FakeTriton(tokens=tokens, fault="slow", step=len(tokens) - 1)
    engine.pause_s = 0.05  # so that some tokens come after the first flush
    async with serving(engine) as endpoint:
        yield engine, endpoint


async def _begun(client: httpx.AsyncClient) -> str:
    body = {"model": "m", "input": "x", "background": True, "stream": True}
    async with client.stream("POST", "/v1/responses", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return str(orjson.loads(line[6:])["response"]["id"])
    raise AssertionError(answer.status_code)


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.01)


async def test_nothing_is_kept_of_what_was_deleted_while_it_was_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _engine(tmp_path) as (engine, endpoint), running(tmp_path, endpoint) as other:
        elsewhere, others, _ = other
        async with running(tmp_path, endpoint) as (client, service, _):
            put = service.conversations.put
            held, go_on = asyncio.Event(), asyncio.Event()
            chunks: list[str] = []

            async def slowly(tenant: str, records: Sequence[Record]) -> None:
                if records[0].order:  # a chunk of events
                    chunks.append(records[0].id)
                    held.set()
                    await go_on.wait()
                await put(tenant, records)

            monkeypatch.setattr(service.conversations, "put", slowly)
            response_id = await _begun(client)
            await held.wait()
            await _until(lambda: engine.reached)  # by now, more events wait to be stored
            assert (await elsewhere.delete(f"/v1/responses/{response_id}")).status_code == 200
            assert await others.conversations.members("", response_id, after=0) == []
            known = list(chunks)
            go_on.set()
            await _until(lambda: engine.stopped)
        assert chunks == known
        assert await others.conversations.members("", response_id, after=0) == []


async def test_one_that_has_no_room_holds_up_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        _engine(tmp_path) as (engine, endpoint),
        running(tmp_path, endpoint) as (elsewhere, _, _),
        running(tmp_path, endpoint) as (client, service, _),
    ):
        full = await _begun(client)
        await _fill(service.conversations, full)
        later = await _begun(client)
        await _until(lambda: engine.reached == 2)

        async def looks(count: int) -> None:
            last = caplog.text.count("It is full") + count
            await _until(lambda: caplog.text.count("It is full") >= last)

        await looks(6)
        events = await service.conversations.members("", later, after=0)
        assert b"response.output_text.delta" in b"".join(chunk.data for chunk in events)
        told = await elsewhere.get(f"/v1/responses/{later}")
        assert told.json()["status"] == "in_progress"
        [before] = await service.conversations.get("", [beat_id(later)])
        await looks(20)
        [beat] = await service.conversations.get("", [beat_id(later)])
        assert beat.version > before.version
        engine.released.set()


async def test_the_events_of_many_hours_have_room() -> None:
    now, kept = 0.0, list[Record]()

    async def keep(records: Sequence[Record]) -> None:
        kept.extend(records)

    events = StoredEvents("resp_x", keep, 2**40, clock=lambda: now)
    looks = range(int(4 * 3600 / POLL_INTERVAL_S))
    for _ in looks:
        now += POLL_INTERVAL_S
        events.write(b"data: x\n\n")
        before = len(kept)
        await events.flush_if_due()
        assert now > 60 or len(kept) == before + 1  # each poll of the first minute stores
    await events.flush()
    assert kept[-1].order == len(looks)
    assert len(kept) < MAX_MEMBERS * 3 / 4


@pytest.mark.slow
async def test_an_answer_is_not_lost_for_its_events(tmp_path: Path) -> None:
    """The answer is stored although its events exceed the tenant's storage limit several times."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    room = 1024 * 1024
    text = TEXT * 1000
    engine = FakeTriton(tokens=ids_of(tmp_path, text), fault=None, step=0)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, conversations_bytes=room, max_seq_len=65536) as gateway,
    ):
        client, service, _ = gateway
        response_id = await _begun(client)
        url = f"/v1/responses/{response_id}"
        followed = await client.get(url, params={"stream": "true"})
        last = orjson.loads(followed.text.rpartition("data: ")[2])
        assert last["type"] == "response.completed", last
        told = (await client.get(url)).json()
        assert told["status"] == "completed"
        assert told["output"] == last["response"]["output"]
        assert told["output"][0]["content"][0]["text"] == text
        kept = await service.conversations.members("", response_id, after=0)
        assert room // 4 < sum(record.size for record in kept) < room * 3 // 4


async def _fill(kept: Conversations, response_id: str) -> None:
    """Add records to the group of a response until the group is full."""
    number, size = 0, 1024
    while size:
        ids = [f"{response_id}/{number + each}x" for each in range(size)]
        try:
            await kept.put("", [Record(id_, b"x", 1, response_id) for id_ in ids])
            number += size
        except ConversationTooLarge:
            size //= 2
