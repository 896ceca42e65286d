"""Silent replicas, which are given up early only if another replica can resume their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.support.two_replicas import GREEDY, TEXT, pair


async def _until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not met():
            await asyncio.sleep(0.01)


async def test_only_one_with_streams_that_another_can_take_is_given_up_soon(tmp_path: Path) -> None:
    async with pair(tmp_path) as it:
        first, other = it.replica(0), it.replica(1)
        assert not first.engine.silence.replaceable()
        await it.breaks("slow", 2)
        asked = asyncio.create_task(it.ask(**GREEDY))
        await _until(lambda: it.first.reached)
        assert first.engine.silence.replaceable()
        assert not other.engine.silence.replaceable()
        # If both replicas are silent, the cause may be the network or this machine.
        it.other.deaf = True
        await _until(lambda: other.engine.suspect)
        assert not first.engine.silence.replaceable()
        it.other.deaf = False
        await _until(first.engine.silence.replaceable)
        it.configure(0)
        await _until(lambda: other.leaving)
        assert not first.engine.silence.replaceable()
        it.first.released.set()
        assert (await asked).json()["choices"][0]["text"] == TEXT


async def test_a_frozen_one_is_left_before_it_is_asked_for_the_third_time(tmp_path: Path) -> None:
    text = "x" * 60
    async with pair(tmp_path, text) as it:
        it.first.pause_s, it.first.freezes_behind = 0.1, 5
        asked = asyncio.create_task(it.ask(max_tokens=60, **GREEDY))
        await _until(lambda: it.first.deaf)
        it.other.tokens = it.ids[it.first.given :]
        answer = await asked
        assert answer.json()["choices"][0]["text"] == text
        assert it.first.unanswered == 2
        assert not it.replica(0).ready
        assert it.replica(1).ready
