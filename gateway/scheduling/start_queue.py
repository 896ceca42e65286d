"""Queue of arrived requests that the event loop has not started to process.

A request takes CPU time of the event loop when it starts, and again for each of its tokens. If an
overloaded loop started all arrived requests at once, it would fall further behind, and serve no
request in time. Therefore only a limited number of queued requests starts in each iteration
("turn") of the loop. This limit keeps turns short under any load. A request whose expected wait is
too long is refused before its body is read and its API key is checked. This refusal costs little
CPU time.

The CPU time for starting a request is estimated in units of work: one unit for each request, and
more units for large bodies. Tenants with waiting requests get equal amounts of work.

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
"""Maximum total work, in units, of the requests that start in one turn of the event loop.

Four units take about 3 ms. A turn of a saturated loop then takes 10 to 20 ms, including the time
for tokens of running requests (`python -m bench --only overload`).
"""
BYTES_PER_UNIT = 4096
"""Body size in bytes that counts as one unit of work, in addition to the request's first unit."""
MAX_REQUEST_WORK = 17
"""Maximum units of work of one request. A larger body is read in a thread."""
MAX_WAIT_S = 0.6
"""Maximum expected wait in seconds. Requests with a longer expected wait are refused.

With this limit, the first token of every accepted request comes within 1 s.
"""
MAX_STEADY_WAIT_S = 0.85
"""Limit that replaces `MAX_WAIT_S` while the load is steady, in seconds.

The load is steady while few requests are refused and the queue hardly grows. For example, clients
that send their next request only after an answer cause a steady load.
"""
STEADY_RATIO = 2.0
"""Maximum ratio of arrived work to started work for a load that counts as steady."""
BURST_S = 0.75
"""Seconds for which a new queue counts as a burst of requests. An older queue is no burst."""
MAX_BURST_WAIT_S = 2.0
"""Maximum expected wait in seconds during a burst; replaces `MAX_WAIT_S`.

The limit is higher because a burst ends by itself.
"""
MAX_WAITING = 1024
"""Number of waiting requests, of all tenants together, at which the queue counts as full.

While the queue is full, each tenant with waiting requests may have an equal part of `MAX_WAITING`.
A request is refused if its tenant already has as many waiting requests.
"""

# Upper bound in seconds for the measured duration of an event loop turn. If the process was paused,
# a turn takes longer, and would make the measured work per second much too low.
_MAX_TURN_S = 0.25
# A new queue has no measurements yet. It starts as if `_ASSUMED_WORK_PER_S` units of work per
# second had been measured for `_ASSUMED_S` seconds.
_ASSUMED_WORK_PER_S = 1000.0
_ASSUMED_S = 0.1
# Half of the maximum period in seconds that the measurements cover. When the maximum is exceeded,
# all measured sums and their duration are halved, so that old measurements lose weight.
_MEMORY_S = 0.5
# Even during a long overload, the queue is empty for moments. If requests queue again within this
# many seconds, the measurements continue. The new queue does not count as a burst if the previous
# queue has refused a request.
_CALM_S = 5.0

_BUSY = (
    "THE GATEWAY'S OWN CORE IS BUSY: requests get 503 before anything is done for them; start "
    "another gateway, or raise GATEWAY_WORKERS, one for each core"
)
_LASTS_S = 60.0
_REFUSING_S = 1.0
_REFUSING_RATIO = 0.5

Begin = Callable[[], bool]
"""Callback that starts a request. Returns False if the request's client has disconnected."""


def work_of(length: int | None) -> int:
    """Return the units of work of a request.

    `length` is the size of the request's body in bytes, or None if the size is unknown. A request
    of unknown size counts as `MAX_REQUEST_WORK` units.
    """
    if length is None:
        return MAX_REQUEST_WORK
    return min(MAX_REQUEST_WORK, 1 + length // BYTES_PER_UNIT)


@dataclass(slots=True)
class _TenantQueue:
    """Waiting requests of one tenant. Each is a pair: its units of work, and its `Begin` callback.

    `work` is the total work of these requests in units.
    """

    requests: deque[tuple[int, Begin]] = field(default_factory=deque)
    work: int = 0


class StartQueue:
    """Queue of requests that wait for the event loop, by tenant.

    Not thread-safe: use an instance in one event loop only. Waiting tenants get equal amounts of
    work per turn. While the loop is not busy, requests start at once and skip the queue.
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
        """Heap of tenants with waiting requests. The tenant with the least served work is first.

        The served work of a tenant grows by the units of work of each request that starts. A new
        tenant begins with the served work of the tenant that was served last. A heap entry consists
        of the served work, a number that breaks ties, and the tenant's name.
        """
        self._served = 0
        self._served_ahead: dict[str, int] = {}
        """Served work of tenants without waiting requests. Cleared when a new queue forms.

        Without this dict, a tenant that never has more than one waiting request would count as new
        at each request, and would always be served before the other tenants.
        """
        self._numbers = count()
        self._waiting = 0
        self._work = 0
        self._turn_work = 0
        self._has_turn = False
        self._age_s, self._measured = 0.0, -math.inf
        self._asked = self._begun = self._watched_s = 0.0
        """Units of work that arrived, units of work that started, and the measured seconds.

        Only time in which requests waited is measured.
        """
        self._refused_count = self._begun_count = 0.0
        """Number of refused requests and of started requests in the measured time."""
        self._done, self._took_s = 0.0, 0.0
        self._is_late: Callable[[], bool] = lambda: False
        self.on_refusal: Callable[[], object] = lambda: None
        """Called for each refused request."""
        self._refused_at = -math.inf
        self._has_refused = False
        """True if a request was refused since the queue was last empty."""

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
        """Warning for operators if a request was refused in the last minute; otherwise ""."""
        return _BUSY if self._clock() - self._refused_at < _LASTS_S else ""

    @property
    def is_refusing(self) -> bool:
        """True while many requests are refused: at least one for every two that start.

        Remains True for up to a second after the last refusal. Always False during a burst.

        Few refusals are no sign of overload: any client can cause some with large request bodies.
        """
        return (
            self._clock() - self._refused_at < _REFUSING_S
            and self._age_s >= BURST_S
            and self._refused_count >= _REFUSING_RATIO * self._begun_count
        )

    def yield_to(self, is_late: Callable[[], bool]) -> None:
        """Start fewer requests while `is_late` returns True: one unit of work per turn of the loop.

        `is_late` returns True while running requests get their tokens too late.
        """
        self._is_late = is_late

    @property
    def _max_turn_work(self) -> int:
        return 1 if self._is_late() else MAX_TURN_WORK

    def try_begin(self, work: int) -> bool:
        """Return True if a request may start now, without waiting.

        If True, `work` is counted for the current turn, so the caller must start the request.
        """
        if self._waiting or self._turn_work >= self._max_turn_work:
            return False
        self._count(work)
        return True

    def wait(self, tenant: str, work: int, begin: Begin) -> float | None:
        """Queue a request and return None, or refuse it and return its expected wait in seconds.

        The request is refused if its expected wait is too long, or if the queue is full. The queue
        calls `begin` when the request may start.

        Args:
            tenant: the tenant's name.
            work: the request's units of work.
            begin: starts the request.
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

        If the result is not None, the request is counted as refused, so the caller must refuse it.
        """
        queue = self._queues.get(tenant)
        if queue is None or not self._is_too_much(queue, work):
            return None
        self._refused_at = self._clock()
        self._refused_count += 1
        self._has_refused = True
        self._asked += work
        self.on_refusal()
        return self._expected_s(queue.work + work)

    def _is_too_much(self, queue: _TenantQueue, work: int) -> bool:
        """Return True if the tenant of `queue` must not queue another request of `work` units."""
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
        """Return the expected time in seconds until `own` units of a tenant's work have started.

        The estimate assumes that each other waiting tenant also starts `own` units in this time. It
        never exceeds the time for all queued work.
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
        """Start queued requests up to the limit of one turn, and update the measurements."""
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
        if self._turn_work >= most:  # only a full turn shows how much work can start per second
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
