"""Requests that ask much of the gateway itself: the event loop goes on with everybody's streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.api.guides import structured_guide, tool_guide
from gateway.api.messages import StructuredOutputs, Tool
from gateway.errors import InvalidRequest
from gateway.parsers.tools.forced import ForcedCall
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _spent(work: Callable[[], Any]) -> float:
    """Seconds of CPU."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


@asynccontextmanager
async def _longest() -> AsyncIterator[Callable[[], float]]:
    """How many seconds of CPU the loop's thread has spent at most between two of its rounds."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    task = asyncio.create_task(beat())
    try:
        yield lambda: longest
    finally:
        task.cancel()


@asynccontextmanager
async def _gateway(
    folder: Path, *, max_seq_len: int = 64
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    save_tokenizer(folder)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    async with (
        serving(FakeTriton(tokens=[60], fault=None, step=0)) as endpoint,
        running(folder, endpoint, max_seq_len=max_seq_len) as (client, service, _),
    ):
        yield client, service


async def _ask(client: httpx.AsyncClient, path: str, **fields: Any) -> tuple[httpx.Response, float]:
    """The answer, and the longest that the loop has stood."""
    content = orjson.dumps({"model": "m", "max_tokens": 1} | fields)
    async with _longest() as longest:
        answer = await client.post(path, content=content)
        return answer, longest()


async def test_a_text_that_is_a_guide_is_read_off_the_loop(tmp_path: Path) -> None:
    """One with a key twice, which is looked for in Python."""
    text = "[" + '{"a":1},' * 50_000 + '{"a":1,"a":2}]'

    def read() -> None:
        with pytest.raises(InvalidRequest):
            structured_guide(StructuredOutputs(json=text))

    fields = {"prompt": "Hi", "structured_outputs": {"json": text}}
    async with _gateway(tmp_path) as (client, _):
        answer, stood = await _ask(client, "/v1/completions", **fields)
        assert "has the key 'a' twice" in answer.json()["error"]["message"]
        assert stood < _spent(read) / 3


async def test_the_guide_of_many_tools_is_made_off_the_loop(tmp_path: Path) -> None:
    schema = {"anyOf": [0] * 10_000}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(64)
    ]
    fields = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    async with _gateway(tmp_path) as (client, _):
        answer, stood = await _ask(client, "/v1/chat/completions", **fields, tool_choice="required")
        assert "tool_choice: cannot be enforced" in answer.json()["error"]["message"]
        given = [Tool.model_validate(tool) for tool in tools]
        assert stood < _spent(lambda: tool_guide(given, ForcedCall(), parallel=True)) / 3
