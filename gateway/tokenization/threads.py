"""Threads for work on text, scheduled fairly by tenant: one tenant's flood does not delay the
others.

Short texts and long ones have a thread each, so that a prompt of a few pages never
waits for a book. The tokenizer releases the GIL. Work of a client that has disconnected is skipped.

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

# Handing work to a thread costs about 0.3 ms, more than tokenizing so many characters does.
INLINE_CHARS = 4096
LONG_CHARS = 64 * 1024
# Characters that may be queued for the thread of short texts, of all tenants and of one: about ten
# seconds. The other thread's queue is bounded where large bodies are read.
_MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS = 32 * 2**20, 16 * 2**20


class TokenizerThreads:
    """The threads, and the scheduler of steps on the event loop itself. Belongs to one event
    loop."""

    def __init__(self) -> None:
        self.steps = LoopScheduler()
        self.short = FairThread("short-text", _MAX_WAITING_CHARS, _MAX_TENANT_WAITING_CHARS)
        # One long text takes a hundred bytes per character, which the process would not give back.
        self.long = FairThread("long-text", after=trim)

    async def run(self, tenant: str, chars: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which is about a text of `chars` characters.

        Raises the errors of `work`, InternalError if it raises no Exception, and Overloaded if too
        much is queued already. If the caller is cancelled before its turn, the work is skipped.
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
    """A thread that runs one job of each tenant in round-robin order."""

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
            after: runs in the thread after each job.
            waits_to_be: the participle in the error if the queue is full.
            rest: how long the thread rests after a job, relative to the job's time.
        """
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._max_chars = max_chars
        self._max_tenant_chars = max_tenant_chars
        self._after = after
        self._waits_to_be = waits_to_be
        self._rest = rest
        # The tenant whose turn it is comes first; it moves to the end when its job has ended.
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._active_tenant: str | None = None

    @property
    def waiting_chars(self) -> int:
        """Return the number of queued characters."""
        return sum([queue.chars for queue in self._queues.values()])

    async def run(self, tenant: str, chars: int, work: Callable[[], T]) -> T:
        """Run work in the thread, whatever its size; see `TokenizerThreads.run`."""
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
            # An error would hold this frame, which holds the job, which holds the error.
            del job
        return result

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self, tenant: str, chars: int) -> None:
        """Raise Overloaded, or drop the last job of the tenant with the most queued characters."""
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
        """Start the next job, of the tenant whose last job is oldest."""
        self._active_tenant = next(iter(self._queues), None)
        if self._active_tenant is not None:
            self._pool.submit(self._run_job, loop, [self._queues[self._active_tenant].popleft()])

    def _run_job(self, loop: asyncio.AbstractEventLoop, only: list[_Job]) -> None:
        """Run a job, in the thread.

        The job is taken out of its list because an error holds the frames that it has passed, and
        the pool's own frame holds the submitted arguments.
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
            # A panic in Rust is one. Without a result, no tenant's job would run any more.
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
