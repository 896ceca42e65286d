"""Queues between the callers of an ``Executor`` and its loop thread. Thread-safe.

Callers enqueue and cancel requests, and wait for responses. The loop fetches requests, and
publishes responses and statistics. The lock is held only for short list operations, never during a
step.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from triton_repo.cpu_executor.checks import PREFIX, check
from triton_repo.cpu_executor.request import Request
from triton_repo.cpu_executor.result import Response
from triton_repo.cpu_executor.stats import IterationStats, RequestStatsPerIteration


class Queued:
    """A request that the loop has not fetched from the queue yet, and the request's id."""

    __slots__ = ("arrival", "id", "request", "sequences")

    def __init__(self, request_id: int, request: Request, sequences: int) -> None:
        self.id = request_id
        self.request = request
        self.sequences = sequences
        self.arrival = time.monotonic()


def sequence_count(request: Request) -> int:
    """Return the number of independent samples that a request asks for; 1 for a beam search."""
    config = request.sampling_config
    return 1 if config.beam_width > 1 else config.num_return_sequences or 1


class Mailbox:
    """The queue of requests, and the responses and statistics that no caller has taken yet."""

    def __init__(
        self, max_queue_size: int | None, max_iterations: int, max_request_iterations: int = 0
    ) -> None:
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._news = threading.Condition(lock)
        self._max_queue_size = max_queue_size or 0
        self._queue: list[tuple[float, int, Queued]] = []
        self._queued_sequences = 0
        self._order = itertools.count()
        self._next_id = 1
        # Ids of unfinished requests. An id leaves `_running` when the final response is published,
        # and `_live` when a caller takes the final response.
        self._running: set[int] = set()
        self._live: set[int] = set()
        self._cancelled: set[int] = set()
        self._ready: dict[int, list[Response]] = {}
        self._stats: deque[IterationStats] = deque(maxlen=max_iterations)
        self.records_request_stats = max_request_iterations > 0
        self._request_stats: deque[RequestStatsPerIteration] = deque(maxlen=max_request_iterations)
        self._closing = False
        self._closed = False

    # Called by users of the executor.

    def enqueue(self, requests: Sequence[Request]) -> list[int]:
        """Queue the requests, and return their ids.

        Raises ``RuntimeError`` if the queue is closed or does not have space for all requests. In
        this case, none of the requests is queued.
        """
        counts = [sequence_count(r) for r in requests]
        with self._work:
            check(not self._closing, "Shutdown called, cannot enqueue requests")
            limit = self._max_queue_size
            if limit > 0 and self._queued_sequences + sum(counts) > limit:
                raise RuntimeError(
                    f"[TensorRT-LLM][ERROR] Maximum queue size of {limit} has been reached, "
                    "please try again later"
                )
            ids = []
            for request, count in zip(requests, counts, strict=True):
                entry = Queued(self._next_id, request, count)
                heapq.heappush(self._queue, (-request.priority, next(self._order), entry))
                self._queued_sequences += count
                self._running.add(entry.id)
                self._live.add(entry.id)
                ids.append(entry.id)
                self._next_id += count
            self._work.notify()
        return ids

    def cancel(self, request_id: int) -> None:
        """Ask the loop to end a request. A finished or unknown request is ignored."""
        with self._work:
            self._check_open()
            if request_id in self._running:
                self._cancelled.add(request_id)

    def take_all(self, timeout: float | None) -> list[Response]:
        """Wait for responses, and return all that are ready; ``[]`` on timeout or shutdown.

        ``timeout`` is in seconds; None waits without limit.
        """
        with self._news:
            self._check_open()
            if not self._ready and not self._closed:
                if timeout is None:
                    self._news.wait_for(lambda: self._ready or self._closed)
                else:
                    self._news.wait(timeout)
            ready, self._ready = self._ready, {}
            self._live.difference_update(
                i for i, responses in ready.items() if _is_last(responses[-1])
            )
        return [response for responses in ready.values() for response in responses]

    def take(self, request_id: int, timeout: float | None) -> list[Response]:
        """Wait for responses of one request and return them; ``[]`` on timeout or shutdown."""
        with self._news:
            self._check_open()
            if request_id not in self._live and request_id < self._next_id:
                text = f"ReqId {request_id} has already been processed and was terminated."
                return [Response(request_id, PREFIX + text)]
            self._news.wait_for(lambda: request_id in self._ready or self._closed, timeout)
            responses = self._ready.pop(request_id, [])
            if responses and _is_last(responses[-1]):
                self._live.discard(request_id)
            return responses

    def take_each(self, ids: Iterable[int], timeout: float | None) -> list[list[Response]]:
        """Call ``take`` for each id, and return the results. ``timeout`` limits the total wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        taken = []
        for request_id in ids:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            taken.append(self.take(request_id, left))
        return taken

    def ready_count(self, request_id: int | None) -> int:
        with self._news:
            self._check_open()
            if request_id is not None:
                return len(self._ready.get(request_id, ()))
            return sum(map(len, self._ready.values()))

    def drain_stats(self) -> list[IterationStats]:
        with self._news:
            self._check_open()
            stats = list(self._stats)
            self._stats.clear()
        return stats

    def drain_request_stats(self) -> list[RequestStatsPerIteration]:
        with self._news:
            self._check_open()
            stats = list(self._request_stats)
            self._request_stats.clear()
        return stats

    @property
    def is_open(self) -> bool:
        return not self._closing

    def close(self) -> None:
        """Refuse new requests. The loop ends after all accepted requests have ended."""
        with self._work:
            self._closing = True
            self._work.notify()
            self._news.notify_all()

    def _check_open(self) -> None:
        check(not self._closed, "Shutdown called")

    # Called by the loop thread.

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until a request is queued or ``timeout`` seconds have passed (None: no limit).

        Return False if the mailbox is closing and no request is queued.
        """
        with self._work:
            if not self._queue and not self._closing and timeout != 0:
                self._work.wait_for(lambda: self._queue or self._closing, timeout)
            return bool(self._queue) or not self._closing

    def fetch(self, admits: Callable[[Queued], bool]) -> list[Queued]:
        """Remove requests from the queue, in the order of their priority, and return them.

        Stop at the first request for which ``admits`` returns False.
        """
        taken = []
        with self._work:
            while self._queue and admits(self._queue[0][2]):
                entry = heapq.heappop(self._queue)[2]
                self._queued_sequences -= entry.sequences
                taken.append(entry)
        return taken

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def pending_cancels(self) -> set[int]:
        """Ids of the requests that the loop should cancel.

        Only the loop thread may read the set. The loop must not store the set, because ``publish``
        removes the ids of ended requests from it.
        """
        return self._cancelled

    def publish(
        self,
        responses: Iterable[Response],
        stats: IterationStats | None = None,
        requests: RequestStatsPerIteration | None = None,
    ) -> None:
        """Publish responses, in order, and the statistics of a step to the callers."""
        with self._news:
            for response in responses:
                self._ready.setdefault(response.request_id, []).append(response)
                if _is_last(response):
                    self._running.discard(response.request_id)
                    self._cancelled.discard(response.request_id)
            if stats is not None:
                self._stats.append(stats)
            if requests is not None:
                self._request_stats.append(requests)
            if self._ready:
                self._news.notify_all()

    def finish(self) -> None:
        """Close the mailbox and wake all waiting callers. Called after the loop has ended."""
        with self._news:
            self._closing = self._closed = True
            self._news.notify_all()


def _is_last(response: Response) -> bool:
    return response.has_error() or response.result.is_final
