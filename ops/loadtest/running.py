"""Sender of the requests of a load test, which measures the times and tokens of each request."""

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
    """Send the requests, and return a `Sample` for each, in the order of `requests`.

    The sample of a failed request has an `error`.

    Args:
        target: where to send the requests.
        requests: the requests.
        times: send times of the requests, in seconds from the start.
        concurrency: maximum number of requests at a time; None is no limit. Requests above the
            limit wait. The wait is not part of their latency.
        timeout_s: seconds after which a request fails.
        on_done: called after each request, with the number of requests that have ended so far, and
            the number of those that have failed.
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
