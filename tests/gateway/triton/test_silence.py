"""Polls that a server leaves unanswered: when it counts as lost, and when as busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.triton.engine import Engine
from tests.support.fake_triton import FakeTriton, serving


async def _seen(endpoint: str) -> Engine:
    engine = Engine(
        endpoint,
        "tensorrt_llm",
        vocab_size=1,
        max_seq_len=64,
        on_stop=lambda _: None,
        on_upload=lambda _: None,
    )
    await engine.refresh()
    assert engine.ready
    return engine


async def _look(
    *,
    flowed: bool = True,
    replaceable: bool = True,
    meanwhile: Callable[[FakeTriton, Engine], object] = lambda *_: None,
) -> tuple[bool, bool, int]:
    """Poll a server that has just become silent. Return (ready, suspect, number of polls).

    `meanwhile` is called repeatedly until the poll is over.
    """
    triton = FakeTriton(tokens=[], fault=None, step=0)
    async with serving(triton) as endpoint:
        engine = await _seen(endpoint)
        engine.silence.replaceable = lambda: replaceable
        triton.deaf = True
        engine.has_received = flowed
        looking = asyncio.create_task(engine.refresh())
        while not looking.done():
            meanwhile(triton, engine)
            await asyncio.sleep(0.01)
        await looking
        await engine.close()
        return engine.ready, engine.suspect, triton.unanswered


async def test_it_is_lost_at_once_only_where_all_that_came_has_stopped_with_it() -> None:
    def says_something(triton: FakeTriton, engine: Engine, look: int) -> None:
        engine.has_received = engine.has_received or triton.unanswered == look

    def answers(triton: FakeTriton, _: Engine) -> None:
        triton.deaf = not triton.unanswered

    found = await asyncio.gather(
        _look(),
        _look(replaceable=False),
        _look(flowed=False),
        _look(meanwhile=lambda *it: says_something(*it, look=1)),
        _look(meanwhile=lambda *it: says_something(*it, look=2)),
        _look(meanwhile=answers),
    )
    assert found == [
        (False, True, 2),
        (True, True, 1),
        (True, True, 1),
        (True, True, 1),
        (True, True, 2),
        (True, False, 1),
    ]


async def test_one_that_is_silent_for_long_is_lost_whoever_else_is_there() -> None:
    triton = FakeTriton(tokens=[], fault=None, step=0)
    async with serving(triton) as endpoint:
        engine = await _seen(endpoint)
        triton.deaf = engine.has_received = True
        told = []
        for _ in range(3):
            await engine.refresh()
            told.append(engine.ready)
        await engine.close()
    assert told == [True, True, False]
    assert triton.unanswered == 3
