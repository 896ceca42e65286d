"""Responses in the background at several workers of one gateway, step by step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import orjson
import pytest

from gateway.conversations.record import Record
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

TEXT = "some words that come one by one"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextlib.asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[tuple[FakeTriton, str]]:
    """It stops before its last token until it is released."""
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokens = ids_of(folder, TEXT)
    engine = FakeTriton(tokens=tokens, fault="slow", step=len(tokens) - 1)
    engine.pause_s = 0.05  # so that some come behind the first look
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
    async with asyncio.timeout(60):
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
                if records[0].order:  # events alone
                    chunks.append(records[0].id)
                    held.set()
                    await go_on.wait()
                await put(tenant, records)

            monkeypatch.setattr(service.conversations, "put", slowly)
            response_id = await _begun(client)
            await held.wait()
            await _until(lambda: engine.reached)  # so there are more events by now
            assert (await elsewhere.delete(f"/v1/responses/{response_id}")).status_code == 200
            assert await others.conversations.members("", response_id, after=0) == []
            known = list(chunks)
            go_on.set()
            await _until(lambda: engine.stopped)
        assert chunks == known
        assert await others.conversations.members("", response_id, after=0) == []
