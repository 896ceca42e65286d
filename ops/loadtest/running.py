"""Sends requests at their times, so many at once as are allowed, and takes the times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ops.loadtest.requests import BenchRequest
from ops.loadtest.sample import Sample
from ops.loadtest.targets import BenchTarget, RequestFailed, clock


async def run(
    target: BenchTarget,
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    concurrency: int | None,
    timeout_s: float,
    on_done: Callable[[int, int], None],
) -> list[Sample]:
    """One sample per request, in their order; a request that fails has its error in it.

    `times` are seconds from the beginning; where `concurrency` is reached, a request waits and is
    measured from when it is sent. `on_done` is told how many are done and how many of them failed.
    """
    slots = asyncio.Semaphore(concurrency if concurrency is not None else max(1, len(requests)))
    samples: list[Sample] = []
    now = clock()
    done = failed = 0

    async def one(request: BenchRequest, sample: Sample) -> None:
        nonlocal done, failed
        sample.began = now()
        try:
            async with asyncio.timeout(timeout_s):
                await target.ask(request, sample, now)
        except TimeoutError:
            sample.error = f"no answer in {timeout_s:g} s"
        except RequestFailed as error:
            sample.error = str(error) or "failed"
        finally:
            sample.ended = now()
            slots.release()
        done += 1
        failed += bool(sample.error)
        on_done(done, failed)

    async with asyncio.TaskGroup() as group:
        for number, (request, due) in enumerate(zip(requests, times, strict=True)):
            if (wait := due - now()) > 0:
                await asyncio.sleep(wait)
            await slots.acquire()
            sample = Sample(number, now())
            samples.append(sample)
            group.create_task(one(request, sample))
    return samples
