"""Failover of a guided answer: another replica regenerates it, and the client gets the new text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.deltas import TokenDelta
from gateway.generation.options import Guide
from gateway.pipeline.continuation import Continuation
from tests.support.generations import generation
from tests.support.in_process import metric_of
from tests.support.two_replicas import (
    CONTINUED,
    PROMPT,
    TEXT,
    events,
    numbers,
    pair,
    read_choice,
    stream_fields,
)

GUIDED = {"guided_regex": "h.*", "seed": 7}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_wherever_a_replica_fails_a_guided_answer_is_the_same(
    tmp_path: Path, stream: bool, temperature: int
) -> None:
    async with pair(tmp_path) as it:
        for step in range(1, len(it.ids)):
            await it.breaks("abort", step)
            it.other.tokens = it.ids
            answer = await it.ask(**GUIDED, **stream_fields(stream), temperature=temperature)
            choice = read_choice(answer, stream=stream)
            assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
            assert "continued" not in choice
            (again,) = it.other.requests
            first = it.first.requests[-1]
            for name in ("input_ids", "request_output_len", "guided_decoding_guide"):
                assert _raw(again, name) == _raw(first, name)
            assert numbers(again, "random_seed", "Q") == [7]
            assert again.id != first.id
        assert metric_of(it.service, CONTINUED, cause="failed") == len(it.ids) - 1
        tokens = metric_of(it.service, "gateway_generations_continued_tokens_total")
        assert tokens == sum(len(PROMPT) + step for step in range(1, len(it.ids)))


@pytest.mark.parametrize("other", ["hallo", "h"])
@pytest.mark.parametrize("stream", [True, False])
async def test_said_otherwise_it_ends_once_and_plainly(
    tmp_path: Path, other: str, stream: bool
) -> None:
    """An answer that is regenerated differently ends in an error, but opens no circuit breaker."""
    async with pair(tmp_path) as it:
        for _ in range(5):
            await it.breaks("abort", 3)
            it.other.tokens = [it.ids[0], *it.ids[4:]] if other == "hallo" else it.ids[:1]
            answer = await it.ask(stream=stream, **GUIDED)
            error = events(answer)[-1] if stream else answer.json()
            assert error["error"]["code"] == "engine_unavailable"
            assert len(it.other.requests) == 1
            it.replica(0).breaker.record_success()
        assert not it.replica(1).breaker.is_open
        assert it.replica(1).in_flight == 0


async def test_several_choices_are_said_again_each_by_itself(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        await it.breaks("abort", 3)
        it.other.tokens = it.ids
        answer = (await it.ask(**GUIDED, n=2)).json()
        assert [choice["text"] for choice in answer["choices"]] == [TEXT] * 2
        assert answer["usage"]["completion_tokens"] == 2 * len(it.ids)
        assert {numbers(each, "random_seed", "Q")[0] for each in it.other.requests} == {7, 8}


def test_what_is_said_again_counts_once() -> None:
    guided = generation(guide=Guide("regex", "h.*"))
    said = Continuation(guided, failures=1)
    said.ids.extend([1, 2, 3])
    assert said.tokens_not_delivered(4) == 4
    said.resume(guided, failed=True)
    assert [said.tokens_not_delivered(unread) for unread in (2, 3, 5)] == [0, 0, 2]
    assert said.strip_delivered(TokenDelta([1, 2], False)) is None
    assert [said.tokens_not_delivered(unread) for unread in (1, 3)] == [0, 2]
    assert said.strip_delivered(TokenDelta([3, 4], False)) == TokenDelta([4], False)
    said.ids.append(4)
    assert said.tokens_not_delivered(2) == 2
    plain = Continuation(generation(), failures=1)
    plain.ids.extend([1, 2, 3])
    plain.resume(generation(), failed=True)
    assert plain.tokens_not_delivered(2) == 2


async def test_a_drain_leaves_it_where_it_is(tmp_path: Path) -> None:
    """A guided answer stays on a drained replica, as another one might answer differently."""
    async with pair(tmp_path, replica_drain_grace=0.05) as it:
        await it.breaks("slow", 2)
        asked = asyncio.create_task(it.ask(**GUIDED))
        while not it.first.reached:
            await asyncio.sleep(0.01)
        it.configure(drain=True)
        while not it.replica(0).is_migrating:
            await asyncio.sleep(0.01)
        it.first.released.set()
        assert (await asked).json()["choices"][0]["text"] == TEXT
        assert not it.other.requests


def _raw(request: Any, name: str) -> bytes:
    names = [tensor.name for tensor in request.inputs]
    raw: bytes = request.raw_input_contents[names.index(name)]
    return raw
