"""The fair text thread: round robin by tenant, bounded queues, no work for cancelled requests."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.errors import InternalError, Overloaded
from gateway.tokenization.threads import INLINE_CHARS, LONG_CHARS, FairThread, TokenizerThreads


class Held:
    """A thread busy with a first job until `release` is set. It then runs the queued jobs."""

    def __init__(self, thread: FairThread) -> None:
        self.thread = thread
        self.release = threading.Event()
        self.done: list[str] = []
        self._begun = threading.Event()
        self.tasks = [asyncio.create_task(thread.run("first", 1, self._hold))]

    async def __aenter__(self) -> Held:
        await asyncio.to_thread(self._begun.wait)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.release.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def ask(self, tenant: str, name: str, chars: int = 1) -> asyncio.Task[None]:
        task = asyncio.create_task(self.thread.run(tenant, chars, lambda: self.done.append(name)))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    def _hold(self) -> None:
        self._begun.set()
        self.release.wait()


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., FairThread]]:
    made: list[FairThread] = []

    def make(**bounds: float) -> FairThread:
        made.append(FairThread("test", **bounds))
        return made[-1]

    yield make
    for thread in made:
        thread.close()


async def test_a_flood_of_one_is_not_before_another(make: Callable[..., FairThread]) -> None:
    async with Held(make()) as held:
        for n in range(100):
            await held.ask("flood", f"flood {n}")
        await held.ask("small", "small")
        await held.ask("other", "other")
        await held.ask("first", "first again")
    assert held.done[:5] == ["flood 0", "small", "other", "first again", "flood 1"]
    assert len(held.done) == 103


async def test_what_nobody_waits_for_is_not_done(make: Callable[..., FairThread]) -> None:
    async with Held(make()) as held:
        left = [await held.ask("a", f"left {n}", chars=100) for n in range(10)]
        await held.ask("a", "stayed", chars=7)
        for task in left:
            task.cancel()
        await asyncio.sleep(0)
        assert held.thread.waiting_chars == 7
    assert held.done == ["stayed"]


async def test_nothing_is_lost_when_the_one_at_work_is_left(
    make: Callable[..., FairThread],
) -> None:
    async with Held(make()) as held:
        held.tasks[0].cancel()
        await held.ask("b", "next")
    assert held.done == ["next"]


async def test_one_tenant_waits_with_no_more_than_its_own_room(
    make: Callable[..., FairThread],
) -> None:
    async with Held(make(max_chars=100, max_tenant_chars=40)) as held:
        fits = await held.ask("a", "a", chars=40)
        refused = await held.ask("a", "more", chars=1)
        other = await held.ask("b", "b", chars=40)
        with pytest.raises(Overloaded, match="of this key"):
            await refused
        held.release.set()
        await asyncio.gather(fits, other)
    assert held.done == ["a", "b"]


async def test_a_tenant_has_no_more_than_so_many_jobs(make: Callable[..., FairThread]) -> None:
    async with asyncio.timeout(60), Held(make(max_tenant_jobs=2)) as held:
        await held.ask("a", "a")
        await held.ask("a", "second of a")
        refused = await held.ask("a", "third of a")
        await held.ask("b", "b")
        with pytest.raises(Overloaded, match="of this key"):
            await refused
    assert held.done == ["a", "b", "second of a"]


async def test_where_all_is_full_most_gives_way(make: Callable[..., FairThread]) -> None:
    async with Held(make(max_chars=100, max_tenant_chars=80)) as held:
        await held.ask("much", "much 0", chars=40)
        last = await held.ask("much", "much 1", chars=40)
        await held.ask("little", "little", chars=30)
        with pytest.raises(Overloaded):
            await last
        refused = await held.ask("late", "late", chars=50)
        with pytest.raises(Overloaded):
            await refused
    assert held.done == ["much 0", "little"]


async def test_what_is_raised_comes_back(make: Callable[..., FairThread]) -> None:
    thread = make()
    with pytest.raises(ZeroDivisionError):
        await thread.run("a", 1, lambda: 1 // 0)
    assert await thread.run("a", 1, lambda: "next") == "next"


async def test_what_has_failed_is_kept_by_nobody(make: Callable[..., FairThread]) -> None:
    """A failed job's objects, which may be 100 MB, are freed without the garbage collector."""

    class Body:
        pass

    body = Body()
    seen = weakref.ref(body)

    def fail(held: list[Body]) -> None:
        _parsed = held.pop()
        raise ZeroDivisionError

    gc.disable()
    try:
        thread, held = make(), [body]
        del body
        with pytest.raises(ZeroDivisionError):
            await thread.run("a", 1, lambda: fail(held))
        await thread.run("a", 1, lambda: None)  # the thread has now dropped the first job
        assert seen() is None
    finally:
        gc.enable()


async def test_a_panic_is_a_mistake_of_ours_and_turns_go_on(
    make: Callable[..., FairThread], caplog: pytest.LogCaptureFixture
) -> None:
    class Panic(BaseException):
        """A stand-in for pyo3's PanicException."""

    def panic() -> None:
        raise Panic("called `Option::unwrap()` on a `None` value")

    thread = make()
    async with asyncio.timeout(300):
        with pytest.raises(InternalError):
            await thread.run("a", 1, panic)
        assert await thread.run("b", 1, lambda: "next") == "next"
    assert "Option::unwrap" in caplog.text


async def test_short_text_stays_and_a_page_does_not_wait_for_a_book() -> None:
    turns = TokenizerThreads()
    try:
        async with Held(turns.long) as held:
            assert await turns.run("b", INLINE_CHARS, threading.get_ident) == threading.get_ident()
            pages = await turns.run("b", LONG_CHARS, threading.get_ident)
            assert pages != threading.get_ident()
            assert not held.release.is_set()
    finally:
        turns.close()


async def test_a_thread_may_rest_between_jobs() -> None:
    """The pause is proportional to each job's duration, which bounds the thread's CPU share."""
    thread = FairThread("test", rest=2.0)
    took: list[float] = []

    def work() -> None:
        began = time.perf_counter()
        time.sleep(0.02)
        took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*[thread.run("a", 0, work) for _ in range(5)])
    thread.close()
    assert time.perf_counter() - began >= sum(took[:4]) * 3 + took[4]
