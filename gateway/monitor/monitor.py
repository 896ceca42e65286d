"""Monitor: collects data about requests for the console, and logs stopped generations.

See decision 008 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import partial

from adapters.record import selected_name
from gateway.monitor.demand import TenantDemand
from gateway.monitor.history import RecentHistory, until_step_ends
from gateway.monitor.requests import RequestTable
from gateway.monitor.watched import RequestSummary
from gateway.observability.request_context import RequestContext, current
from gateway.stops import LOGGED_REASONS, Stops
from gateway.troubles import Troubles

log = logging.getLogger("gateway.stops")


RequestIds = Mapping[str, str | None]
"""Ids of a request, for the log line that is written when engines have stopped its generations.

The ids are copied from the `RequestContext`. A reference to the context would form a reference
cycle with the `Stops` of the request, and would delay freeing its memory.
"""


class Monitor:
    """Data about the requests of one process. Use an instance on one event loop only.

    `count_uploads` returns the total number of adapter uploads to engines. `count_waiting` returns
    the number of requests that are queued now.
    """

    def __init__(self, count_uploads: Callable[[], int], count_waiting: Callable[[], int]) -> None:
        self.started = time.time()
        self.requests = RequestTable()
        self.demand = TenantDemand()
        self.history = RecentHistory()
        self._count_uploads = count_uploads
        self._count_waiting = count_waiting

    def record_answer(self, context: RequestContext, status: int, *, again: bool = False) -> None:
        """Count a request that has ended, and store its summary.

        Call this for requests to endpoints that generate text.

        Args:
            context: the context of the request.
            status: the HTTP status with which the request ended.
            again: True in the second call for the same request. There are two calls if the client
                disconnects and the generation continues: one at the disconnect, and one at the end.
        """
        totals, batch = self.history.totals, context.batch
        if status >= 500:
            totals.errors += 1
        demand, tenant = self.demand, context.tenant
        if not again:
            totals.requests += 1
        if tenant is not None:
            if not again:
                demand.requests[tenant] += 1
            if context.refusal is not None:
                # Do not treat 429 and 499 as mistakes of the client. With status 429, a limit is
                # reached. With status 499, the queue cannot meet the client's deadline.
                mistake = 400 <= status < 500 and status not in (429, 499)
                demand.count_refusal(tenant, context.refusal, mistake=mistake)
        if batch is None:
            return
        ended = RequestSummary(context, batch, status)
        totals.tokens += ended.completion_tokens
        if tenant is not None:
            demand.tokens[tenant] += ended.completion_tokens + ended.prompt_tokens
        if context.adapter_version is not None:
            demand.adapter_requests[selected_name(context.adapter_version)] += 1
        if ended.ttft_s is not None:
            self.history.first_tokens.add(ended.ttft_s)
        self.requests.end(ended)

    def count_busy(self, tenant: str, why: str, refused: int) -> None:
        """Count requests that were refused before any processing, because the process is busy.

        `refused` is the number of requests. `tenant` is empty if the requests had unknown keys.
        """
        self.history.totals.requests += refused
        self.history.totals.errors += refused
        if tenant:
            self.demand.requests[tenant] += refused
            self.demand.count_refusal(tenant, why, times=refused)

    def make_stops(self, context: RequestContext) -> Stops:
        """Return a new `Stops` for a request whose generations may be cancelled.

        When the engines have ended all cancelled generations of the request, the `Stops` object
        calls `_log_stopped`, which writes a log line.
        """
        ids = {
            "request_id": context.request_id,
            "trace_id": context.trace_id,
            "tenant": context.tenant,
            "replica": context.replica,
        }
        return Stops(partial(_log_stopped, ids))

    async def follow(self, troubles: Troubles) -> None:
        """Update `history`, `demand` and `requests` every ten seconds. Run until cancelled."""
        while True:
            await asyncio.sleep(until_step_ends(time.time()))
            try:
                self._step()
            except Exception as error:  # do not end the task: the next step may succeed
                text = f"the last hour is not recorded: {error!r}"
                troubles.hold("history", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("history")

    def _step(self) -> None:
        tokens = sum([watched.batch.meter.tokens_now for watched in self.requests])
        self.history.step(time.time(), tokens, self._count_uploads(), self._count_waiting())
        self.demand.step()
        self.requests.tidy()


def _log_stopped(ids: RequestIds, stops: Stops) -> None:
    """Log that the engines have stopped all cancelled generations of a request.

    This is the second log line of the request. The first is written when the client has received
    the response or has disconnected. The first line does not wait for the engines, so it is written
    even if an engine never reports the end of a generation.
    """
    level = logging.INFO if stops.reason in LOGGED_REASONS else logging.DEBUG
    if log.isEnabledFor(level):
        # Log in a new context that has the request's id. The current task receives responses for
        # all requests, so its own context has no id.
        Context().run(_log, ids, stops, level)


def _log(ids: RequestIds, stops: Stops, level: int) -> None:
    current.set(RequestContext(ids["request_id"] or "-"))
    facts = stops.facts() | dict(ids)
    if (stop_ms := facts.get("stop_ms")) is None:
        log.log(level, "stopped (%s): no end was seen", stops.reason, extra={"facts": facts})
    else:
        words = "stopped (%s): the engine ended it after %s ms"
        log.log(level, words, stops.reason, stop_ms, extra={"facts": facts})
