"""Queue of requests that have arrived and that the event loop has not begun to process.

In each iteration ("turn") of the event loop, only a limited number of queued requests begins. Every
request that begins takes the loop's time at once, and again for each of its tokens. Without a
limit, an overloaded loop would begin all requests that came meanwhile, fall further behind, and
serve no request in time. With the limit, turns stay short under any load, and requests wait in a
queue of known length. A request whose expected wait is too long is refused while that is still
cheap: before its body is read or its key is checked.

Processing is measured in units of work: one for each request, and more for large bodies. The queue
is fair between tenants.

See decision 085 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

MAX_TURN_WORK = 4
"""Units of work that one turn of the event loop may begin.

They take about 3 ms. A turn of a saturated loop, tokens included, then takes 10 to 20 ms
(`python -m bench --only overload`).
"""
BYTES_PER_UNIT = 4096
"""Each full 4,096 bytes of a request's body count as one more unit of work."""
MAX_REQUEST_WORK = 17
"""Maximum units of work of one request. A larger body is read in a thread."""
MAX_WAIT_S = 0.6
"""Expected wait in seconds above which a request is refused.

The first token of every accepted request then comes within 1 s.
"""
MAX_STEADY_WAIT_S = 0.85
"""Limit that replaces `MAX_WAIT_S` while few requests are refused and the queue hardly grows.

Such a load comes from many clients that send their next request only after an answer.
"""
STEADY_RATIO = 2.0
"""Maximum ratio of arriving work to work that begins at which the load counts as steady."""
BURST_S = 0.75
"""Seconds for which the queue must have existed before it no longer counts as a burst."""
MAX_BURST_WAIT_S = 2.0
"""Limit that replaces `MAX_WAIT_S` during a burst, because a burst ends by itself."""
MAX_WAITING = 1024
"""Number of requests that may wait, for all tenants together.

If as many wait, a further request is refused if its tenant has its equal part of them.
"""

# Maximum length in seconds with which a turn counts for the pace. A longer turn comes from a pause
# of the process, and such a pause says nothing about the pace.
_MAX_TURN_S = 0.25
# Pace (work per second) that is assumed for a new queue, as if measured for this many seconds.
_ASSUMED_WORK_PER_S = 1000.0
_ASSUMED_S = 0.1
# Counts are halved once they cover twice as many seconds as this.
_MEMORY_S = 0.5
# A queue that forms within this many seconds after the last one continues its measurements, and is
# not a burst if the last one refused requests: the queue is empty for moments during a long flood.
_CALM_S = 5.0

_BUSY = (
    "THE GATEWAY'S OWN CORE IS BUSY: requests get 503 before anything is done for them; start "
    "another gateway, or raise GATEWAY_WORKERS, one for each core"
)
_LASTS_S = 60.0
_REFUSING_S = 1.0
_REFUSING_RATIO = 0.5

Begin = Callable[[], bool]
"""Function that begins a request. Returns False if the request's client has disconnected."""


def work_of(length: int | None) -> int:
    """Return the units of work of a request.

    `length` is the size of the request's body in bytes. None means unknown and counts as the
    maximum.
    """
    if length is None:
        return MAX_REQUEST_WORK
    return min(MAX_REQUEST_WORK, 1 + length // BYTES_PER_UNIT)


@dataclass(slots=True)
class _TenantQueue:
    """The waiting requests of one tenant, each with its work, and the total of their work."""

    requests: deque[tuple[int, Begin]] = field(default_factory=deque)
    work: int = 0


class StartQueue:
    """Queue of requests that wait for the event loop, by tenant.

    Not thread-safe: use an instance in one event loop only. Waiting tenants get equal parts of the
    work that begins. While the loop is idle, a request begins at once, and the queue costs no time.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """Start with an empty queue.

        Args:
            clock: returns the time in seconds.
            call_soon: runs a callback in the event loop's next turn. The default is `call_soon` of
                the running loop.
        """
        self._clock = clock
        self._call_soon = call_soon
        self._queues: dict[str, _TenantQueue] = {}
        self._order: list[tuple[int, int, str]] = []
        """Heap of the tenants with waiting requests; the one with the least served work is first.

        An entry is the tenant's served work, a number that breaks ties, and the tenant's name.
        """
        self._served = 0
        self._served_ahead: dict[str, int] = {}
        """Served work of tenants whose queue became empty while other tenants wait.

        Remembered because a tenant that always has a single waiting request would otherwise count
        as new each time, and be served first.
        """
        self._numbers = count()
        self._waiting = 0
        self._work = 0
        self._turn_work = 0
        self._has_turn = False
        self._age_s, self._measured = 0.0, -math.inf
        self._asked = self._begun = self._watched_s = 0.0
        """Recent work that arrived, recent work that began, and the seconds in which both did.

        Only times in which requests waited are included.
        """
        self._refused_count = self._begun_count = 0.0
        """Number of requests that were refused, and of requests that began, in the same seconds."""
        self._done, self._took_s = 0.0, 0.0
        self._is_late: Callable[[], bool] = lambda: False
        self._refused_at = -math.inf
        self._has_refused = False
        """True if requests were refused since the queue was last empty."""

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return self._waiting

    @property
    def waiting_by_tenant(self) -> dict[str, int]:
        """Number of waiting requests by tenant. Tenants without a waiting request are left out."""
        return {tenant: len(queue.requests) for tenant, queue in self._queues.items()}

    @property
    def problem(self) -> str:
        """Warning text while requests are refused and for a minute after; otherwise empty."""
        return _BUSY if self._clock() - self._refused_at < _LASTS_S else ""

    @property
    def is_refusing(self) -> bool:
        """True while many requests are refused: at least one for every two that begin.

        Remains true for up to a second after the last refusal. Always False during a burst.

        A few refusals say little: any client can cause them with requests that look expensive.
        """
        return (
            self._clock() - self._refused_at < _REFUSING_S
            and self._age_s >= BURST_S
            and self._refused_count >= _REFUSING_RATIO * self._begun_count
        )

    def yield_to(self, is_late: Callable[[], bool]) -> None:
        """Limit each turn to one request while `is_late` returns True.

        `is_late` returns True while requests that have begun get their tokens too late.
        """
        self._is_late = is_late

    @property
    def _max_turn_work(self) -> int:
        return 1 if self._is_late() else MAX_TURN_WORK

    def try_begin(self, work: int) -> bool:
        """Return True if a request may begin now, without waiting.

        The request's work then counts as begun in this turn.
        """
        if self._waiting or self._turn_work >= self._max_turn_work:
            return False
        self._count(work)
        return True

    def wait(self, tenant: str, work: int, begin: Begin) -> float | None:
        """Queue a request, and return None. `begin` is called when the request may begin.

        If the expected wait is too long, do not queue the request, and return the expected wait in
        seconds.

        Args:
            tenant: the tenant's name.
            work: the request's units of work.
            begin: begins the request.
        """
        if (wait_s := self.find_refusal(tenant, work)) is not None:
            return wait_s
        if not self._waiting:
            self._start_measuring()
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = _TenantQueue()
            served = max(self._served, self._served_ahead.pop(tenant, 0))
            heappush(self._order, (served, next(self._numbers), tenant))
        queue.requests.append((work, begin))
        queue.work += work
        self._waiting += 1
        self._work += work
        self._asked += work
        self._plan_turn()
        return None

    def find_refusal(self, tenant: str, work: int) -> float | None:
        """Return the expected wait in seconds if a request must be refused, None otherwise.

        The request is then counted as refused, so the caller must refuse it.
        """
        queue = self._queues.get(tenant)
        if queue is None or not self._is_too_much(queue, work):
            return None
        self._refused_at = self._clock()
        self._refused_count += 1
        self._has_refused = True
        self._asked += work
        return self._expected_s(queue.work + work)

    def _is_too_much(self, queue: _TenantQueue, work: int) -> bool:
        """Return True if one more request of a tenant that already waits must be refused."""
        if self._waiting >= MAX_WAITING and len(queue.requests) * len(self._queues) >= MAX_WAITING:
            return True
        return self._expected_s(queue.work + work) > self._max_wait_s

    @property
    def _max_wait_s(self) -> float:
        if self._age_s < BURST_S:
            return MAX_BURST_WAIT_S
        is_steady = not self.is_refusing and self._asked <= STEADY_RATIO * self._begun
        return MAX_STEADY_WAIT_S if is_steady else MAX_WAIT_S

    def _expected_s(self, own: int) -> float:
        """Return the seconds until a tenant will have been served `own` units of work.

        In this time, each other waiting tenant is served as much, or all that it has.
        """
        ahead = min(self._work + own, own * len(self._queues))
        return ahead * self._took_s / self._done

    def _start_measuring(self) -> None:
        self._served_ahead.clear()
        calm_s, self._measured = self._clock() - self._measured, self._clock()
        refused_before, self._has_refused = self._has_refused, False
        if not refused_before and self._clock() - self._refused_at >= _CALM_S:
            self._age_s = 0.0
        if calm_s < _CALM_S:
            return
        self._age_s = 0.0
        self._done, self._took_s = _ASSUMED_WORK_PER_S * _ASSUMED_S, _ASSUMED_S
        self._asked = self._begun = self._done
        self._refused_count = self._begun_count = 0.0
        self._watched_s = _ASSUMED_S

    def _count(self, work: int) -> None:
        self._turn_work += work
        self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            call_soon = self._call_soon or asyncio.get_running_loop().call_soon
            call_soon(self._turn)

    def _turn(self) -> None:
        """Begin as many requests as one turn of the event loop may, and update the pace."""
        self._has_turn = False
        self._turn_work = 0
        if not self._waiting:
            return
        now = self._clock()
        turn_s = min(now - self._measured, _MAX_TURN_S)
        self._measured = now
        self._age_s += turn_s
        most = self._max_turn_work
        while self._waiting and self._turn_work < most:
            self._begin_next()
        if self._turn_work >= most:  # only a full turn shows how much work can begin per second
            self._took_s += turn_s
            self._done += self._turn_work
        if self._took_s > 2 * _MEMORY_S:
            self._done, self._took_s = self._done / 2, self._took_s / 2
        self._watched_s += turn_s
        if self._watched_s > 2 * _MEMORY_S:
            self._asked, self._begun = self._asked / 2, self._begun / 2
            self._refused_count, self._begun_count = self._refused_count / 2, self._begun_count / 2
            self._watched_s /= 2
        self._plan_turn()

    def _begin_next(self) -> None:
        served, _, tenant = heappop(self._order)
        self._served = served
        queue = self._queues[tenant]
        work, begin = queue.requests.popleft()
        queue.work -= work
        self._waiting -= 1
        self._work -= work
        self._begun += work
        self._begun_count += 1
        if queue.requests:
            heappush(self._order, (served + work, next(self._numbers), tenant))
        else:
            del self._queues[tenant]
            self._served_ahead[tenant] = served + work
        if begin():
            self._turn_work += work
