"""An adapter that is larger than the engine's whole cache: refused, and others lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from adapters.adapter import Converted
from gateway.errors import AdapterDoesNotFit
from gateway.generation import Lora
from gateway.triton.engine import Engine
from tests.support.adapter_store import becomes
from tests.support.event_clock import EventClock
from tests.support.fake_triton import serving
from tests.support.generations import generation
from tests.support.lora_files import content
from tests.support.lora_triton import LoraTriton

UNIT = 6000
BIG = 9


@asynccontextmanager
async def _engine(triton: LoraTriton) -> AsyncIterator[Engine]:
    async with serving(triton) as endpoint:
        engine = Engine(
            endpoint,
            "tensorrt_llm",
            vocab_size=64,
            max_seq_len=64,
            on_stop=lambda _: None,
            on_cold_send=lambda _: None,
        )
        await engine.refresh()
        yield engine
        await engine.close()


def _ask(engine: Engine, task_id: int) -> asyncio.Task[None]:
    units = 4 if task_id == BIG else 1

    async def weights() -> Converted:
        return content(task_id, units * UNIT)

    async def answer() -> None:
        lora = Lora(f"a{task_id}", task_id, units * UNIT, weights)
        asked = generation(request_id=f"r{task_id}", lora=lora)
        with engine.generate(asked, asyncio.get_running_loop().time() + 600) as tokens:
            while not (await tokens.first()).final:
                pass

    return asyncio.create_task(answer())


def _times_sent(triton: LoraTriton, times: int) -> Callable[[], bool]:
    return lambda: triton.brought.count(BIG) == times


async def test_it_is_refused_and_others_have_what_they_had() -> None:
    clock = EventClock()
    triton = LoraTriton(3 * UNIT)
    async with _engine(triton) as engine:
        others = {task_id: _ask(engine, task_id) for task_id in (1, 2)}
        await becomes(lambda: triton.running == {1, 2})
        big = [_ask(engine, BIG) for _ in range(3)]
        for task_id in (1, 2):
            await becomes(lambda: BIG in engine.residency.room.waiting)
            triton.ended[task_id].set()
            await others[task_id]
            triton.ended[task_id].clear()
        tried = len(triton.brought)
        while not all(task.done() for task in big):
            await becomes(lambda: len(triton.brought) > tried or all(t.done() for t in big))  # noqa: B023
            tried = len(triton.brought)
            clock.leap(1)
        for task in big:
            with pytest.raises(AdapterDoesNotFit, match=r"`a9` \(24000 bytes\).*lora_cache_host"):
                await task
        assert triton.brought.count(BIG) <= 12  # each of the three might have sent it 34 times
        assert triton.stopped == []
        sent = len(triton.brought)
        again = _ask(engine, BIG)
        with pytest.raises(AdapterDoesNotFit):
            await again
        assert len(triton.brought) == sent
        assert not engine.residency.room.active
        others = {task_id: _ask(engine, task_id) for task_id in (1, 2, 3)}
        await becomes(lambda: triton.running == {1, 2, 3})
        for task_id, other in others.items():
            triton.ended[task_id].set()
            await other


async def test_what_only_seemed_not_to_fit_comes() -> None:
    """Another gateway's requests had the cache in use, or what was stopped just now."""
    clock = EventClock()
    triton = LoraTriton(4 * UNIT)
    triton.held[1], triton.in_use[1] = UNIT, 1
    async with _engine(triton) as engine:
        big = _ask(engine, BIG)
        await becomes(_times_sent(triton, 1))
        triton.in_use[1] = 0
        clock.leap(1)
        await becomes(lambda: triton.running == {BIG})
        triton.ended[BIG].set()
        await big
        assert triton.brought == [BIG, BIG]
