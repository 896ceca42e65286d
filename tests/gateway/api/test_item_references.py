"""Size limits of requests that reference stored items by id, each possibly many times."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.api.responses import keeping
from gateway.api.responses.stored import FINISHED, encode
from gateway.conversations.record import Record
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

MOST = 256 * 1024
LARGE = "x" * (MOST // 32)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@contextlib.asynccontextmanager
async def _gateway(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Any, FakeTriton]]:
    """Run a gateway that allows `MOST` bytes in a body, and as many in referenced stored items."""
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    engine = FakeTriton(tokens=ids_of(folder, "4"), fault=None, step=0)
    limits = {"max_seq_len": 2 * MOST, "max_body_bytes": MOST}
    async with (
        serving(engine) as endpoint,
        running(folder, endpoint, **limits) as (client, service, _),
    ):
        yield client, service, engine


async def _conversation(client: httpx.AsyncClient, *texts: str) -> tuple[str, list[str]]:
    """Create a conversation. Return its id and the ids of its items."""
    made = (await client.post("/v1/conversations", json={})).json()["id"]
    items = [{"role": "user", "content": text} for text in texts]
    added = await client.post(f"/v1/conversations/{made}/items", json={"items": items})
    return made, [item["id"] for item in added.json()["data"]]


def _named(ids: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": one} for one in ids]


def _check_refused(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "conversation_too_large")
    assert error["message"].endswith(f"bytes before this request; allowed: {MOST}.")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_a_large_item_is_not_named_more_often_than_there_is_room_for(
    tmp_path: Path, path: str
) -> None:
    async with _gateway(tmp_path) as (client, _, engine):
        _, [large, small] = await _conversation(client, LARGE, "2+2?")
        _check_refused(await client.post(path, json={"model": "m", "input": _named([large] * 64)}))
        assert not engine.requests
        for few in ([large] * 4, [small] * 64):
            answer = await client.post(path, json={"model": "m", "input": _named(few)})
            assert answer.status_code == 200, answer.text


async def test_what_is_named_comes_beside_what_is_gone_on_from(tmp_path: Path) -> None:
    async with _gateway(tmp_path) as (client, _, _):
        made, [large, *_] = await _conversation(client, *[LARGE] * 20)
        body = {"model": "m", "conversation": made}
        _check_refused(
            await client.post("/v1/responses", json=body | {"input": _named([large] * 20)})
        )
        answer = await client.post("/v1/responses", json=body | {"input": _named([large])})
        assert answer.status_code == 200, answer.text


async def test_nor_does_a_conversation_get_them(tmp_path: Path) -> None:
    async with _gateway(tmp_path) as (client, _, _):
        _, [large] = await _conversation(client, LARGE * 2)
        made, _ = await _conversation(client, "2+2?")
        items = f"/v1/conversations/{made}/items"
        _check_refused(await client.post(items, json={"items": _named([large] * 20)}))
        assert len((await client.get(items)).json()["data"]) == 1


async def test_items_of_one_large_response_are_named_together(tmp_path: Path) -> None:
    """Each item counts with its own size, not with the size of the response that contains it."""
    digits = "0" * 32
    output = [
        {
            "type": "message",
            "id": f"msg_{digits}_{n}",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "4", "annotations": []}],
        }
        for n in range(9)
    ]
    response = {"id": f"resp_{digits}", "status": "completed", "output": output}
    said = [{"type": "message", "id": f"msg_{digits}_i0", "role": "user", "content": LARGE * 16}]
    data = encode(orjson.dumps(response), orjson.dumps(said), [], 0, turned=False)
    async with _gateway(tmp_path) as (client, service, _):
        await service.conversations.put("", [Record(response["id"], data, FINISHED)])
        named = _named([item["id"] for item in output])
        answer = await client.post("/v1/responses", json={"model": "m", "input": named})
        assert answer.status_code == 200, answer.text


async def test_large_items_are_read_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []
    read = keeping.parse_items

    def watched(told: Any) -> Any:
        if told:
            readers.append(threading.current_thread())
        return read(told)

    monkeypatch.setattr(keeping, "parse_items", watched)
    async with _gateway(tmp_path) as (client, _, _):
        _, [large] = await _conversation(client, LARGE)
        body = {"model": "m", "input": _named([large] * 16)}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    assert readers
    assert threading.main_thread() not in readers
