"""Threads for work on text, which serve the tenants in round-robin order.

There is one thread for short texts and one for long texts, so a prompt of a few pages never waits
for a text of book length. The threads do not block the event loop, because the tokenizer releases
the GIL. If a client disconnects, its queued work is skipped.

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

# Maximum length of a text that is processed on the event loop. Handing work to a thread costs about
# 0.3 ms, which is more than the tokenization of such a text.
INLINE_CHARS = 4096
# Maximum length of a text that is processed in the thread for short texts.
LONG_CHARS = 64 * 1024
# Maximum number of characters in the queue for short texts: of all tenants together (about ten
# seconds of work), and of one tenant. The queue for long texts needs no limit here: the number of
# large request bodies that the gateway reads at the same time is limited.
_MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS = 32 * 2**20, 16 * 2**20


class TokenizerThreads:
    """The threads for short and long texts, and the scheduler of steps on the event loop.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self.steps = LoopScheduler()
        self.short = FairThread("short-text", _MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS)
        # Return memory to the system after each long text. Tokenizing takes about 100 bytes per
        # character, which the allocator would not release by itself.
        self.long = FairThread("long-text", after=trim)

    async def run(self, tenant: str, chars: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which processes a text of `chars` characters.

        Raises any Exception that `work` raises, InternalError if `work` raises another
        BaseException, and Overloaded if too much text is queued already. If the caller is cancelled
        before `work` has started, `work` is skipped.
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
    """The queued jobs of one tenant, the oldest first."""

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
        max_tenant_jobs: float = math.inf,
        after: Callable[[], None] = lambda: None,
        *,
        waits_to_be: str = "tokenized",
        rest: float = 0.0,
    ) -> None:
        """Make a thread.

        Args:
            name: the thread's name.
            max_chars: maximum number of characters in the queues of all tenants.
            max_tenant_chars: maximum number of characters in the queue of one tenant.
            max_tenant_jobs: maximum number of jobs in the queue of one tenant.
            after: called in the thread after each job.
            waits_to_be: participle that follows "waits to be" in the error for a full queue.
            rest: pause of the thread after each job, as a multiple of the job's duration.
        """
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._max_chars = max_chars
        self._max_tenant_chars = max_tenant_chars
        self._max_tenant_jobs = max_tenant_jobs
        self._after = after
        self._waits_to_be = waits_to_be
        self._rest = rest
        # Queues of the tenants, in the order in which they are served. A tenant moves to the end
        # when its job has ended.
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._active_tenant: str | None = None

    @property
    def waiting_chars(self) -> int:
        """Number of characters in the queues of all tenants."""
        return sum([queue.chars for queue in self._queues.values()])

    async def run(self, tenant: str, chars: int, work: Callable[[], T]) -> T:
        """Execute `work` in the thread, and return its result, as `TokenizerThreads.run` does."""
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
            # Delete `job` to break a reference cycle: an exception refers to this stack frame, the
            # frame refers to the job, and the job refers to the exception.
            del job
        return result

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self, tenant: str, chars: int) -> None:
        """Make space in the queues for a job of `chars` characters. Raise Overloaded if this fails.

        If the queues are full, the tenant with the most queued characters loses its last job: the
        call of `run` that waits for this job raises Overloaded. If `tenant` itself has the most
        queued characters, or exceeds a limit for one tenant, its new job is refused instead.
        """
        own = self._queues.get(tenant)
        mine = chars + (own.chars if own else 0)
        if mine > self._max_tenant_chars or len(own or ()) >= self._max_tenant_jobs:
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
        """Remove a job from the tenant's queue. Do nothing if the job has started."""
        queue = self._queues.get(tenant)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue and tenant != self._active_tenant:
                del self._queues[tenant]

    def _begin_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a job of the tenant that has not been served for the longest time."""
        self._active_tenant = next(iter(self._queues), None)
        if self._active_tenant is not None:
            self._pool.submit(self._run_job, loop, [self._queues[self._active_tenant].popleft()])

    def _run_job(self, loop: asyncio.AbstractEventLoop, only: list[_Job]) -> None:
        """Run the only job of the list `only`. Called in the thread.

        This method takes the job out of the list to avoid a reference cycle. An exception of the
        job refers to a stack frame of the thread pool, and this frame refers to the list. A job in
        the list would close the cycle, because the job's future refers to the exception.
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
            # A panic in Rust raises a BaseException. Convert it to an error, so that the job ends:
            # otherwise no further job of any tenant would run.
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
