"""Monitoring data that is not in the metrics: for the console, and for log lines of stopped
generations.

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
"""Fields of a request that are logged once its engine has stopped.

The fields are copied, because a reference to the request would form a cycle with its `Stops`.
"""


class Monitor:
    """The monitor of one process. It must be used on one event loop.

    `count_uploads` returns how many requests have uploaded adapter weights to an engine,
    `count_waiting` how many requests are queued.
    """

    def __init__(self, count_uploads: Callable[[], int], count_waiting: Callable[[], int]) -> None:
        self.started = time.time()
        self.requests = RequestTable()
        self.demand = TenantDemand()
        self.history = RecentHistory()
        self._count_uploads = count_uploads
        self._count_waiting = count_waiting

    def record_answer(self, context: RequestContext, status: int, *, again: bool = False) -> None:
        """Record the end of a request to an endpoint that generates.

        Args:
            context: the request.
            status: the HTTP status with which the request ended.
            again: True if the request was recorded before, when its client left, and then continued
                to generate.
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
                # 429 and 499 are no mistakes: 429 comes from a limit, and 499 from the queue if the
                # client's deadline is too near.
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
        """Count `refused` requests that were refused before any processing.

        `tenant` is empty if the requests had unknown keys.
        """
        self.history.totals.requests += refused
        self.history.totals.errors += refused
        if tenant:
            self.demand.requests[tenant] += refused
            self.demand.count_refusal(tenant, why, times=refused)

    def make_stops(self, context: RequestContext) -> Stops:
        """Return a new `Stops` for a request, which tracks when engines end the generations that
        the request abandons.
        """
        ids = {
            "request_id": context.request_id,
            "trace_id": context.trace_id,
            "tenant": context.tenant,
            "replica": context.replica,
        }
        return Stops(partial(_log_stopped, ids))

    async def follow(self, troubles: Troubles) -> None:
        """Record the history and demand at the end of each step. Run until cancelled."""
        while True:
            await asyncio.sleep(until_step_ends(time.time()))
            try:
                self._step()
            except Exception as error:  # continue: requests must not fail because of the history
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
    """Log that the engines have stopped all abandoned generations of a request.

    This is a log line of its own. The request's line is written earlier, when the client has its
    answer or has disconnected. If that line waited for the engine, it would be lost when an engine
    never reports the end.
    """
    level = logging.INFO if stops.reason in LOGGED_REASONS else logging.DEBUG
    if log.isEnabledFor(level):
        # Run in a new context: the ends of all streams are received in a shared task, whose context
        # belongs to no request.
        Context().run(_log, ids, stops, level)


def _log(ids: RequestIds, stops: Stops, level: int) -> None:
    current.set(RequestContext(ids["request_id"] or "-"))
    facts = stops.facts() | dict(ids)
    if (stop_ms := facts.get("stop_ms")) is None:
        log.log(level, "stopped (%s): no end was seen", stops.reason, extra={"facts": facts})
    else:
        words = "stopped (%s): the engine ended it after %s ms"
        log.log(level, words, stops.reason, stop_ms, extra={"facts": facts})
