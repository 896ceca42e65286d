"""Threads for work on text, scheduled fairly by tenant: many texts of one tenant do not delay
others.

There is one thread for short texts and one for long texts, so a prompt of a few pages never waits
for a book. The tokenizer releases the GIL. Work for a client that has disconnected is skipped.

See decision 040 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.errors import InternalError, Overloaded
from gateway.memory import trim
from gateway.tokenization.loop_scheduler import LoopScheduler

T = TypeVar("T")

log = logging.getLogger(__name__)

# Shorter texts are processed on the event loop: handing work to a thread costs about 0.3 ms, more
# than tokenizing so many characters.
INLINE_CHARS = 4096
# Longer texts are processed in the thread for long texts.
LONG_CHARS = 64 * 1024
# Characters that may be queued for the thread of short texts, for all tenants together and for one
# tenant: about ten seconds of work. The queue of long texts is bounded where large bodies are read.
_MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS = 32 * 2**20, 16 * 2**20


class TokenizerThreads:
    """The threads for short and long texts, and the scheduler of steps on the event loop.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self.steps = LoopScheduler()
        self.short = FairThread("short-text", _MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS)
        # Release memory after each long text, which takes a hundred bytes per character: otherwise
        # the process would retain that memory.
        self.long = FairThread("long-text", after=trim)

    async def run(self, tenant: str, chars: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which processes a text of `chars` characters.

        Raises each Exception of `work`, InternalError if `work` raises another BaseException, and
        Overloaded if too much text is queued already. If the caller is cancelled before `work` has
        started, `work` is skipped.
        """
        if chars <= INLINE_CHARS:
            return work()
        return await (self.short if chars <= LONG_CHARS else self.long).run(tenant, chars, work)

    def close(self) -> None:
        self.short.close()
        self.long.close()


@dataclass(eq=False, slots=True)
class _Job:
    chars: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class _Queue(deque[_Job]):
    """The queued jobs of one tenant, in order."""

    @property
    def chars(self) -> int:
        return sum([job.chars for job in self])


class FairThread:
    """A thread that serves tenants in round-robin order, one job at a time."""

    def __init__(
        self,
        name: str,
        max_chars: float = math.inf,
        max_tenant_chars: float = math.inf,
        after: Callable[[], None] = lambda: None,
        *,
        waits_to_be: str = "tokenized",
        rest: float = 0.0,
    ) -> None:
        """Make a thread.

        Args:
            name: the thread's name.
            max_chars: characters that may be queued for all tenants.
            max_tenant_chars: characters that may be queued for one tenant.
            after: called in the thread after each job.
            waits_to_be: the last word of "waits to be tokenized" in the error for a full queue.
            rest: the time that the thread sleeps after a job, as a multiple of the job's time.
        """
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._max_chars = max_chars
        self._max_tenant_chars = max_tenant_chars
        self._after = after
        self._waits_to_be = waits_to_be
        self._rest = rest
        # The first tenant is the next to be served. A tenant moves to the end when its job has
        # ended.
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._active_tenant: str | None = None

    @property
    def waiting_chars(self) -> int:
        """Return the number of queued characters."""
        return sum([queue.chars for queue in self._queues.values()])

    async def run(self, tenant: str, chars: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, executed in the thread; see `TokenizerThreads.run`."""
        if self._active_tenant is not None:
            self._admit(tenant, chars)
        loop = asyncio.get_running_loop()
        job = _Job(chars, work, loop.create_future())
        self._queues.setdefault(tenant, _Queue()).append(job)
        if self._active_tenant is None:
            self._begin_next(loop)
        try:
            result: T = await job.done
        except asyncio.CancelledError:
            self._forget(tenant, job)
            raise
        finally:
            # Break a reference cycle: an error holds this frame, which holds the job, which holds
            # the error.
            del job
        return result

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self, tenant: str, chars: int) -> None:
        """Make sure that the queue has space for a job of `chars` characters.

        If the queue is full, the last job of the tenant with the most queued characters is dropped.
        Raises Overloaded if that is this tenant, or if this tenant has reached its own limit.
        """
        own = self._queues.get(tenant)
        mine = chars + (own.chars if own else 0)
        if mine > self._max_tenant_chars:
            raise self._overloaded_error("of this key ")
        if self.waiting_chars + chars <= self._max_chars:
            return
        most, queue = max(self._queues.items(), key=lambda item: item[1].chars)
        if queue.chars <= mine:
            raise self._overloaded_error()
        last = queue[-1]
        self._forget(most, last)
        if not last.done.done():
            last.done.set_exception(self._overloaded_error())

    def _forget(self, tenant: str, job: _Job) -> None:
        """Remove a job from its queue, unless it has started."""
        queue = self._queues.get(tenant)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue and tenant != self._active_tenant:
                del self._queues[tenant]

    def _begin_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the next job: one of the tenant that has not been served for the longest time."""
        self._active_tenant = next(iter(self._queues), None)
        if self._active_tenant is not None:
            self._pool.submit(self._run_job, loop, [self._queues[self._active_tenant].popleft()])

    def _run_job(self, loop: asyncio.AbstractEventLoop, only: list[_Job]) -> None:
        """Run the only job of a list, in the thread.

        The job is removed from the list to avoid a reference cycle: an error of the job holds the
        frames that it has passed through, and the pool's frame holds the submitted arguments.
        """
        job = only.pop()
        began = time.perf_counter()
        result: Any = None
        error: Exception | None = None
        try:
            result = job.work()
        except Exception as raised:
            error = raised
        except BaseException:
            # A panic in Rust raises a BaseException. Report an error even then: without a result,
            # no further job of any tenant would run.
            log.exception("work on text in the thread %s failed", threading.current_thread().name)
            error = InternalError("The server had an unexpected error.")
        loop.call_soon_threadsafe(self._finish_job, loop, job.done, result, error)
        del job, result, error
        self._after()
        if self._rest:
            time.sleep(self._rest * (time.perf_counter() - began))

    def _finish_job(
        self,
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[Any],
        result: Any,
        error: Exception | None,
    ) -> None:
        assert self._active_tenant is not None
        if self._queues[self._active_tenant]:
            self._queues.move_to_end(self._active_tenant)
        else:
            del self._queues[self._active_tenant]
        self._begin_next(loop)
        if done.done():
            return  # the caller was cancelled
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def _overloaded_error(self, whose: str = "") -> Overloaded:
        return Overloaded(
            f"Too much text {whose}waits to be {self._waits_to_be}; try again shortly."
        )
