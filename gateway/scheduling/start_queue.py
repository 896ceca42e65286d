"""Bounds how many requests the event loop begins with in one turn; the rest waits, by tenant.

Each request that begins takes the loop's time at once, and again for each of its tokens. Without a
bound, a loop that is late begins with all that came meanwhile, is later still, and serves nobody in
time. With it a turn stays short whatever comes, and what must wait waits where its length is known:
a request whose wait would be too long is refused while that is still cheap, before its body is read
or its key is checked.

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
"""Units of work that one turn of the loop begins with. Some 3 ms, so that a turn of a saturated
loop, tokens included, takes 10 to 20 ms (`python -m bench --only overload`)."""
BYTES_PER_UNIT = 4096
"""Bytes of a body that are a unit of work more."""
MAX_REQUEST_WORK = 17
"""The most work that one request counts as. A larger body is read in a thread."""
MAX_WAIT_S = 0.6
"""The expected wait above which a request is refused. Its first token then comes within 1 s."""
MAX_STEADY_WAIT_S = 0.85
"""The same while none is refused and the queue hardly grows: many clients, which each wait for
their answer."""
STEADY_RATIO = 2.0
"""The most work that is asked for in that case, in parts of what begins."""
BURST_S = 0.75
"""A queue that has been there for less is a burst."""
MAX_BURST_WAIT_S = 2.0
"""The same in a burst, which ends by itself."""
MAX_WAITING = 1024
"""Requests that may wait; above that, those of a tenant that has less than its part of these."""

# A turn counts for no more: a pause of the process says nothing of its pace.
_MAX_TURN_S = 0.25
# The pace that is assumed of a loop whose queue has just begun.
_ASSUMED_WORK_PER_S = 1000.0
_ASSUMED_S = 0.1
# Twice that is remembered of the pace.
_MEMORY_S = 0.5
# A queue that begins sooner after another has that one's pace, and is no burst after refusals:
# of a lasting flood, queues end for moments.
_CALM_S = 5.0

_BUSY = (
    "THE GATEWAY'S OWN CORE IS BUSY: requests get 503 before anything is done for them; start "
    "another gateway, or raise GATEWAY_WORKERS, one for each core"
)
_LASTS_S = 60.0
_REFUSING_S = 1.0
_REFUSING_RATIO = 0.5

Begin = Callable[[], bool]
"""Begins with a request; returns False if its client has left."""


def work_of(length: int | None) -> int:
    """Return the units of work of a request whose body has `length` bytes, None if unknown."""
    if length is None:
        return MAX_REQUEST_WORK
    return min(MAX_REQUEST_WORK, 1 + length // BYTES_PER_UNIT)


@dataclass(slots=True)
class _TenantQueue:
    """The waiting requests of one tenant, and their work together."""

    requests: deque[tuple[int, Begin]] = field(default_factory=deque)
    work: int = 0


class StartQueue:
    """The queue of one process. Belongs to one event loop.

    Tenants get equal parts of the work that begins. An idle loop begins with a
    request at once, and nothing here takes time while nobody waits.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`call_soon` runs a callback in the event loop's next turn."""
        self._clock = clock
        self._call_soon = call_soon
        self._queues: dict[str, _TenantQueue] = {}
        self._order: list[tuple[int, int, str]] = []
        """A heap of the tenants that wait, by the work that each has been served."""
        self._served = 0
        self._served_ahead: dict[str, int] = {}
        """Of tenants that have left while others wait, the work that each had been served: one that
        always has a single request here must not pass for one that was served nothing."""
        self._numbers = count()
        self._waiting = 0
        self._work = 0
        self._turn_work = 0
        self._has_turn = False
        self._age_s, self._measured = 0.0, -math.inf
        self._asked = self._begun = self._watched_s = 0.0
        """Work that was asked for while requests waited, that has started, and in how long."""
        self._refused_count = self._begun_count = 0.0
        """Requests that were refused and that have started in the same time."""
        self._done, self._took_s = 0.0, 0.0
        self._is_late: Callable[[], bool] = lambda: False
        self._refused_at = -math.inf
        self._has_refused = False
        """True if requests were refused since the queue was empty last."""

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return self._waiting

    @property
    def waiting_by_tenant(self) -> dict[str, int]:
        """The tenants that have requests here, with their number."""
        return {tenant: len(queue.requests) for tenant, queue in self._queues.items()}

    @property
    def problem(self) -> str:
        """A text while requests are refused, and for a minute after; else empty."""
        return _BUSY if self._clock() - self._refused_at < _LASTS_S else ""

    @property
    def is_refusing(self) -> bool:
        """Return True while a large part of the requests is refused, and for a second after.

        A few refusals say little: any client can cause them with requests that look expensive.
        """
        return (
            self._clock() - self._refused_at < _REFUSING_S
            and self._age_s >= BURST_S
            and self._refused_count >= _REFUSING_RATIO * self._begun_count
        )

    def yield_to(self, is_late: Callable[[], bool]) -> None:
        """Begin with one request a turn while `is_late` returns True: what has begun is late."""
        self._is_late = is_late

    @property
    def _max_turn_work(self) -> int:
        return 1 if self._is_late() else MAX_TURN_WORK

    def try_begin(self, work: int) -> bool:
        """Return True if the caller may begin with a request now, which is then counted."""
        if self._waiting or self._turn_work >= self._max_turn_work:
            return False
        self._count(work)
        return True

    def wait(self, tenant: str, work: int, begin: Begin) -> float | None:
        """Queue a request; `begin` is called when it is its turn.

        Return the expected wait in seconds, and queue nothing, if that is too long.
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
        """Return the expected wait in seconds if a request is to be refused for it; else None.

        The caller refuses that request, or has `wait` do so.
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
        """Return True if a tenant that waits already must not have one more request here."""
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
        """Return in how many seconds a tenant has been served so much work.

        Others are served as much meanwhile, as far as they have it.
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
        """A new turn of the loop: begin with as much as it may."""
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
        if self._turn_work >= most:  # with less, more could have begun
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
