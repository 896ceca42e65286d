"""Length limits of a queue that tenants share, and removal of requests from a full queue."""

from __future__ import annotations

import time

from gateway.errors import Overloaded
from gateway.scheduling.fair_pool import FairPool
from gateway.scheduling.queues import TenantQueue


class Eviction:
    """Limits for the number of queued requests: of all tenants together, and of each tenant."""

    def __init__(self, pool: FairPool, limit: int, limit_of_tenant: int) -> None:
        self._pool = pool
        self._limit = limit
        self._limit_of_tenant = limit_of_tenant

    def make_space(self, queue: TenantQueue) -> None:
        """Make space for one more request in `queue`. Raise Overloaded if there is no space.

        If the maximum number of queued requests of all tenants is reached, remove the last request
        of the tenant with the longest queue. The removed request fails with Overloaded. If the
        longest queue is at most one request longer than `queue`, raise Overloaded for the new
        request instead. Requests that have already started (`is_resumed`) are never removed.
        """
        if queue.waiting >= self._limit_of_tenant:
            raise self._build_error(queue)
        if self._pool.queued.total < self._limit:
            return
        ends = [
            (other, lane, entries[-1].since)
            for other in self._pool.queues.values()
            for lane, entries in other.by_lane.items()
            if entries and not entries[-1].is_resumed
        ]
        if not ends:
            raise self._build_error(queue)
        longest, lane, _ = max(ends, key=lambda end: (end[0].waiting, end[2]))
        if longest.waiting <= queue.waiting + 1:
            raise self._build_error(queue)
        last = self._pool.pop_last(longest, lane)
        if not last.admitted.done():
            last.admitted.set_exception(self._build_error(longest))

    def _build_error(self, own: TenantQueue) -> Overloaded:
        """Return the Overloaded error for a full queue.

        The error's retry time is the time in seconds that the tenant's oldest queued request has
        waited, because a new request would wait about as long. If the tenant has no queued request,
        the oldest queued request of all tenants is used.
        """
        queues = [own] if own.waiting else self._pool.queues.values()
        since = [
            entries[0].since for queue in queues for entries in queue.by_lane.values() if entries
        ]
        waited_s = time.monotonic() - min(since) if since else 0.0
        message = "Too many requests are waiting; try again later."
        return Overloaded(message, waited_s, "queue_full")
