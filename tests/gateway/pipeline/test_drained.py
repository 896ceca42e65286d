"""Answers of a drained replica move to another replica, and none is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import metric_of
from tests.support.two_replicas import CONTINUED, GREEDY, TEXT, Pair, numbers, pair

GRACE_S = 0.05


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not met():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def begun(folder: Path, **asked: Any) -> AsyncIterator[tuple[Pair, asyncio.Task[Any]]]:
    """Start an answer whose first replica has sent two tokens and holds back the third."""
    async with pair(folder, replica_drain_grace=GRACE_S) as it:
        await it.breaks("slow", 2)
        task = asyncio.create_task(it.ask(**(asked or GREEDY)))
        await until(lambda: it.first.reached)
        # The gateway still reads the third token. The other replica continues after it.
        it.other.tokens = it.ids[3:]
        yield it, task


async def drained(it: Pair) -> None:
    it.configure(drain=True)
    await until(lambda: it.replica(0).is_migrating)


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def test_a_drained_replica_sends_its_streams_away(tmp_path: Path) -> None:
    async with begun(tmp_path) as (it, asked):
        await drained(it)
        it.first.released.set()
        assert text_of(await asked) == TEXT
        assert numbers(it.other.requests[0], "request_output_len") == [37]
        await until(lambda: it.first.stopped == [it.first.requests[-1].id])
        assert metric_of(it.service, CONTINUED, cause="drained") == 1
        assert metric_of(it.service, "gateway_stops_total", reason="moved") == 1
        assert not metric_of(it.service, "gateway_replica_failing", replica=it.endpoints[0])


@pytest.mark.parametrize("error", ["", "CUDA runtime error", "Maximum queue size of 1 has been"])
async def test_where_the_other_fails_it_goes_back(tmp_path: Path, error: str) -> None:
    """The drained replica still works, so the answer returns there if the other replica fails."""
    async with begun(tmp_path) as (it, asked):
        it.other.fault, it.other.step, it.other.error = ("error" if error else "abort"), 0, error
        it.first.tokens = it.ids[3:]
        await drained(it)
        it.first.released.set()
        assert text_of(await asked) == TEXT
        assert (len(it.first.requests), len(it.other.requests)) == (2, 1)
        assert it.replica(0).in_flight == it.replica(1).in_flight == 0


async def test_nobody_is_sent_to_what_is_left_alone(tmp_path: Path) -> None:
    async with begun(tmp_path) as (it, asked):
        for _ in range(3):
            it.replica(1).breaker.record_failure(time.monotonic(), probe=False)
        assert not it.replica(1).breaker.allows
        await drained(it)
        it.first.released.set()
        assert text_of(await asked) == TEXT
        assert not it.other.requests


async def test_who_had_nowhere_to_go_looks_again(tmp_path: Path) -> None:
    """An answer moves even to a replica that is added after the drain's grace period."""
    text = "x" * 60
    async with pair(tmp_path, text, replica_drain_grace=GRACE_S) as it:
        it.configure(0)
        await until(lambda: len(list(it.service.replicas)) == 1)
        it.first.pause_s = 0.1
        asked = asyncio.create_task(it.ask(max_tokens=60, **GREEDY))
        await until(lambda: it.replica(0).in_flight)
        it.configure(0, drain=True)
        await until(lambda: it.replica(0).is_migrating)
        it.configure(drain=True)
        await until(lambda: it.other.requests)
        prompt = len(numbers(it.other.requests[0], "input_ids"))
        answer = (await asked).json()
        # The fake engine sends all its tokens, however many are requested.
        assert len(answer["choices"][0]["text"]) == prompt - 3 + 60
        assert metric_of(it.service, CONTINUED, cause="drained") == 1


async def test_what_is_named_again_keeps_its_streams(tmp_path: Path) -> None:
    """A replica whose address is missing in DNS for a moment keeps its streams."""
    async with begun(tmp_path) as (it, asked):
        old = it.replica(0)
        it.configure(1)
        await until(lambda: old.leaving)
        it.configure()
        await until(lambda: it.replica(0) is not old)
        await asyncio.sleep(2 * GRACE_S)
        it.first.released.set()
        assert text_of(await asked) == TEXT
        assert (len(it.first.requests), len(it.other.requests)) == (1, 0)
