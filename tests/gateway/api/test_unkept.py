"""Limit, per tenant, on request items held in memory until their response is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api.body import LARGE_BODY_BYTES
from gateway.api.responses import keeping
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ROOM = 3  # large requests that fit the limit


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.01)


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_who_asks_much_at_once_is_told_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small request that references a large item counts with the item's size to the limit."""
    monkeypatch.setattr(keeping, "_MAX_PENDING_BYTES", ROOM * LARGE_BODY_BYTES)
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokens = ids_of(tmp_path, "words")
    engine = FakeTriton(tokens=tokens, fault="slow", step=0)
    async with serving(engine) as endpoint, running(tmp_path, endpoint) as (client, _, _):
        made = await client.post(
            "/v1/conversations", json={"items": [_said("x" * LARGE_BODY_BYTES)]}
        )
        conversation = made.json()["id"]
        items = (await client.get(f"/v1/conversations/{conversation}/items")).json()["data"]
        reference = {"type": "item_reference", "id": items[0]["id"]}

        async def ask(*given: dict[str, Any], **fields: Any) -> httpx.Response:
            body = {"model": "m", "input": [*given, _said("y")], "truncation": "auto"} | fields
            return await client.post("/v1/responses", json=body)

        # Failed requests are not counted.
        for _ in range(ROOM + 1):
            assert (await ask(reference, model="another")).status_code == 404
        waiting = [asyncio.create_task(ask(reference)) for _ in range(ROOM)]
        await _until(lambda: engine.reached == ROOM)
        for background in (False, True):
            refused = await ask(reference, background=background)
            assert refused.status_code == 503, refused.text
            assert "wait to be stored" in refused.json()["error"]["message"]
        small = asyncio.create_task(ask())
        await _until(lambda: engine.reached == ROOM + 1)
        engine.released.set()
        answers = await asyncio.gather(*waiting, small)
        assert {answer.status_code for answer in answers} == {200}
        assert (await ask(reference)).status_code == 200
