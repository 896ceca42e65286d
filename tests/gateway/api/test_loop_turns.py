"""Requests below 64 KiB must not block the event loop, and so all streams, for 20 ms.

The tests allow half of that, because other machines are slower.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer
from tests.support.loop_gateway import SentRequest, loop_gateway
from tests.support.slow_bodies import MAX_BODY_BYTES, find_slowest

_MAX_TURN_S = 0.010
_RUNS = 5
# Number of bodies that the search tries. `python -m tests.support.slow_bodies` tries more.
_SEARCH_BODIES = 150


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_SAID = _said("Hi")
_ANSWER = {
    "type": "object",
    "properties": {"b": {"type": "string"}},
    "additionalProperties": False,
}


def _chat(tools: int, schema: Any, **fields: Any) -> SentRequest:
    offered = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}}
        for n in range(tools)
    ]
    body = {"model": "m", "max_tokens": 1, "messages": _SAID, "tools": offered} | fields
    return SentRequest("/v1/chat/completions", orjson.dumps(body))


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "anyOf": [[[[schema]]]]}
    return schema


_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _ANSWER}}
_ITEMS = [{"role": "user", "content": "x" * 30}] * 900
_CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
_TURNS = [*_SAID, {"role": "assistant", "content": [_CALL] * 1180}, *_SAID]

HANDMADE = {
    "truncated messages": SentRequest(
        "/v1/responses",
        orjson.dumps({"model": "m", "truncation": "auto", "input": _ITEMS}),
    ),
    "calls": SentRequest(
        "/v1/messages", orjson.dumps({"model": "m", "max_tokens": 1, "messages": _TURNS})
    ),
    "tools beside a format": _chat(60, {"anyOf": [[]] * 320}, response_format=_FORMAT),
    "forced tools": _chat(8, {"anyOf": [[]] * 2600}, tool_choice="required"),
    "forced tools of deep schemas": _chat(6, _nested(30), tool_choice="required"),
    "beginnings of control tokens": _chat(0, None, messages=_said("</think>" + "<" * 65_000)),
    "control tokens": _chat(0, None, messages=_said("<|im_end|>" * 6500)),
    "members of a query": SentRequest("/v1/responses/resp_1?" + "&".join(["include=a"] * 6000)),
    "empty members of a query": SentRequest("/v1/models?" + "a&" * 30_000),
    "inputs": SentRequest(
        "/v1/embeddings", orjson.dumps({"model": "words", "input": ["a"] * 2048})
    ),
    "documents": SentRequest(
        "/v1/rerank", orjson.dumps({"model": "ranker", "query": "a", "documents": ["a"] * 2048})
    ),
    "token strings": SentRequest(
        "/tokenize", orjson.dumps({"prompt": "a" * 65_000, "return_token_strs": True})
    ),
}


@pytest.mark.parametrize("max_seq_len", [2000, 200_000])
async def test_no_turn_of_the_loop_is_long(tmp_path: Path, max_seq_len: int) -> None:
    """The small context truncates more conversations, and most prompts exceed it."""
    turns = {}
    async with loop_gateway(tmp_path, max_seq_len=max_seq_len) as gateway:
        for name, asked in HANDMADE.items():
            assert asked.body is None or len(asked.body) < MAX_BODY_BYTES, name
            turns[name] = await gateway.shortest(asked, _RUNS, _MAX_TURN_S)
    assert not {name: turn for name, turn in turns.items() if turn.seconds > _MAX_TURN_S}


async def test_no_turn_is_long_for_the_worst_bodies_that_a_search_finds(tmp_path: Path) -> None:
    async with loop_gateway(tmp_path) as gateway:
        for asked, turn in await find_slowest(gateway, _SEARCH_BODIES):
            if turn.seconds > _MAX_TURN_S:
                again = await gateway.shortest(asked, _RUNS, _MAX_TURN_S)
                assert again.seconds <= _MAX_TURN_S, f"{again}: {asked}"


@pytest.mark.parametrize(("parameters", "status"), [(1024, 404), (1025, 400)])
async def test_a_url_of_more_parameters_is_refused(
    tmp_path: Path, parameters: int, status: int
) -> None:
    save_tokenizer(tmp_path)
    async with (
        serving(FakeTriton(tokens=[60], fault=None, step=0)) as endpoint,
        running(tmp_path, endpoint) as (client, _, _),
    ):
        query = "&".join(["a=1"] * parameters)
        answer = await client.get(f"/v1/responses/resp_1?{query}")
        assert answer.status_code == status, answer.text
        # Completions do not read the query string, so it has no limit.
        body = {"model": "m", "prompt": "Hi", "max_tokens": 1}
        answer = await client.post(f"/v1/completions?{query}", json=body)
        assert answer.status_code == 200, answer.text
