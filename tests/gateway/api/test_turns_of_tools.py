"""Small requests with many tools, whose processing would block the event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.api.body import LARGE_BODY_BYTES
from gateway.api.openai.schemas import ChatCompletionRequest
from gateway.api.responses import endpoints, prompts
from gateway.api.responses.chats import ResponsesChat, build_chat
from gateway.api.responses.stored import parse_items
from gateway.errors import InvalidRequest
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
TOOLS = [{"type": "custom", "name": f"f{n}"} for n in range(1024)]
TALK = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 300
QUESTION = {"role": "user", "content": "x"}


@asynccontextmanager
async def asked(folder: Path, **changed: Any) -> AsyncIterator[httpx.AsyncClient]:
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    fields = {"tool_form": "hermes"} | changed
    async with serving(servicer) as endpoint, running(folder, endpoint, **fields) as (client, _, _):
        yield client


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list with an entry per rendering of tools: True if it ran on the event loop."""
    found: list[bool] = []
    offered = ChatCompletionRequest.offered_tools.fget  # type: ignore[attr-defined]

    def record(wanted: ChatCompletionRequest) -> Any:
        found.append(threading.current_thread() is threading.main_thread())
        return offered(wanted)

    monkeypatch.setattr(ChatCompletionRequest, "offered_tools", property(record))
    return found


async def test_many_tools_are_rendered_once_and_off_the_event_loop(
    tmp_path: Path, on_loop: list[bool]
) -> None:
    body = {"model": "m", "input": "x", "tools": TOOLS}
    assert len(orjson.dumps(body)) < LARGE_BODY_BYTES
    async with asked(tmp_path, max_seq_len=2_000_000) as client:
        told = await client.post("/v1/responses", json=body)
    assert told.status_code == 200, told.text
    assert on_loop == [False]


async def test_tools_of_an_earlier_turn_are_rendered_off_the_event_loop(
    tmp_path: Path, on_loop: list[bool]
) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    async with asked(tmp_path, max_seq_len=2_000_000) as client:
        items = [QUESTION, more]
        first = await client.post("/v1/responses", json={"model": "m", "input": items})
        body = {"model": "m", "input": "x", "previous_response_id": first.json()["id"]}
        told = await client.post("/v1/responses", json=body)
    assert told.status_code == 200, told.text
    assert on_loop == [False, False]


async def test_what_an_earlier_turn_brings_is_named_where_it_has_no_effect(tmp_path: Path) -> None:
    brought = [{"type": "web_search"}, {"type": "function", "name": "f", "strict": True}]
    more = {"type": "additional_tools", "role": "developer", "tools": brought}
    body = {"model": "m", "input": [QUESTION, more]}
    async with asked(tmp_path, max_seq_len=4096) as client:
        first = await client.post("/v1/responses", json=body)
        assert first.status_code == 200, first.text
        body = {"model": "m", "input": "x", "previous_response_id": first.json()["id"]}
        second = await client.post("/v1/responses", json=body)
        counted = await client.post("/v1/responses/input_tokens", json=body)
    assert first.headers["x-ignored-parameters"] == (
        "input[1].tools[0].type=web_search, tools.strict"
    )
    named = "conversation.tools[0].type=web_search, tools.strict"
    assert second.headers["x-ignored-parameters"] == named
    assert counted.headers["x-ignored-parameters"] == named


async def test_strict_parameters_refuse_what_an_earlier_turn_brings(tmp_path: Path) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]}
    async with asked(tmp_path, max_seq_len=4096, strict_parameters=True) as client:
        conversation = await client.post("/v1/conversations", json={"items": [QUESTION, more]})
        assert conversation.status_code == 200, conversation.text
        body = {"model": "m", "input": "x", "conversation": conversation.json()["id"]}
        refused = await client.post("/v1/responses", json=body)
    assert refused.status_code == 400, refused.text
    assert "conversation.tools[0].type=web_search" in refused.json()["error"]["message"]


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:100]], ids=len)
async def test_what_does_not_fit_however_short_is_not_cut_again_and_again(
    tmp_path: Path, on_loop: list[bool], monkeypatch: pytest.MonkeyPatch, tools: list[Any]
) -> None:
    cut: list[ResponsesChat] = []

    def count(*given: Any) -> ResponsesChat:
        cut.append(build_chat(*given))
        return cut[-1]

    monkeypatch.setattr(prompts, "build_chat", count)
    fields = {"truncation": "auto", "max_output_tokens": 2990, "tools": tools}
    body = {"model": "m", "input": [*TALK[: 2 * len(tools)], QUESTION]} | fields
    assert len(orjson.dumps(body)) < LARGE_BODY_BYTES
    async with asked(tmp_path, max_seq_len=3000) as client:
        told = await client.post("/v1/responses", json=body)
    assert told.status_code == 400, told.text
    assert len(cut) == 4  # cuts at user messages and at any item, for two answer lengths each
    assert not any(on_loop[1:])


async def test_tools_keep_their_paths_where_items_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[ResponsesChat] = []
    truncated = prompts.truncate

    async def record(*given: Any, **named: Any) -> ResponsesChat:
        found.append(await truncated(*given, **named))
        return found[-1]

    more = {"type": "additional_tools", "tools": [{"type": "function", "name": "f"}]}
    long = {"role": "user", "content": "long " * 200}
    body = {"model": "m", "truncation": "auto", "input": [long, more, long, QUESTION]}
    monkeypatch.setattr(endpoints, "truncate", record)
    async with asked(tmp_path, max_seq_len=512) as client:
        told = await client.post("/v1/responses", json=body)
    assert told.status_code == 200, told.text
    [chat] = found
    assert len(chat.messages) == 1
    assert chat.tool_paths == ("input[1].tools[0]",)


def test_a_stored_item_of_another_release_is_refused_in_words() -> None:
    found = {"type": "message", "role": "user", "content": [{"type": "input_text"}]}
    with pytest.raises(InvalidRequest, match=r"cannot read a stored item: \[0\].*text: Field"):
        parse_items([found])
