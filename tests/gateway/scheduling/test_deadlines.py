"""Deadlines that pass before the first token, and when they count against the replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

FAILING = "gateway_replica_failing"
ENOUGH = 4
"""Missed deadlines that suffice to open the breaker, which takes three failures in a row."""


def _triton(folder: Path, text: str) -> FakeTriton:
    save_tokenizer(folder)
    return FakeTriton(tokens=ids_of(folder, text), fault=None, step=0)


async def _ask(client: httpx.AsyncClient, **headers: str) -> int:
    body: dict[str, Any] = {"model": "m", "prompt": "x", "max_tokens": 4000}
    # The timeout is measured by the clock that the test advances.
    asked = client.post("/v1/completions", json=body, headers=headers, timeout=3600)
    return (await asked).status_code


async def _until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not met():
            await asyncio.sleep(0.01)


def _has_reached(triton: FakeTriton, times: int) -> bool:
    return triton.reached >= times


def _has_given(triton: FakeTriton, tokens: int) -> bool:
    return triton.given >= tokens


async def test_one_that_streams_to_others_is_not_blamed(tmp_path: Path) -> None:
    """A replica that streams to another request is not blamed for a missing first token."""
    clock = EventClock()
    busy = _triton(tmp_path, "x" * 4000)
    busy.pause_s = 0.05
    async with (
        serving(busy) as endpoint,
        running(tmp_path, endpoint, max_seq_len=8192) as (client, service, _),
    ):
        streams = asyncio.create_task(_ask(client))
        await _until(lambda: busy.given > 0)
        busy.fault = "slow"  # applies to all later requests
        for number in range(1, ENOUGH + 1):
            hasty = asyncio.create_task(_ask(client, **{"x-request-timeout": "11"}))
            await _until(partial(_has_reached, busy, number))
            while not hasty.done():
                clock.leap(1)
                await _until(partial(_has_given, busy, busy.given + 2))
            assert await hasty == 504
        assert metric_of(service, FAILING, replica=endpoint) == 0
        assert not streams.done()
        busy.pause_s = 0
        busy.released.set()
        assert await streams == 200


async def test_one_that_says_nothing_is_left_alone(tmp_path: Path) -> None:
    """A replica without tokens is blamed, although it reports that its model is ready."""
    clock = EventClock()
    silent = _triton(tmp_path, "hello")
    async with (
        serving(silent) as endpoint,
        running(tmp_path, endpoint) as (client, service, _),
    ):
        assert await _ask(client) == 200
        silent.fault = "slow"
        asked = 0
        while not metric_of(service, FAILING, replica=endpoint):
            # A late poll may still count the first answer as a success. One more missed deadline is
            # needed then.
            assert asked <= ENOUGH
            asked += 1
            given = partial(_has_reached, silent, asked)
            hasty = _ask(client, **{"x-request-timeout": "15"})
            assert await clock.leap_once(given, hasty, 16) == 504
        assert asked >= 3
        silent.fault = None
