"""What this process knows of itself beyond metrics: for a console, and for whoever stopped a
request."""

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
from gateway.monitor.watched import EndedRequest
from gateway.observability.request_context import RequestContext, current
from gateway.stops import LOGGED_REASONS, Stops
from gateway.troubles import Troubles

log = logging.getLogger("gateway.stops")


RequestIds = Mapping[str, str | None]
"""Of a request, what is told when its engine has let go. The request itself refers to its stops,
and would be kept alive by them."""


class Monitor:
    """Belongs to one event loop.

    `cold_sends` says how many requests have brought weights to an engine, `waiting` how many
    requests wait for their turn.
    """

    def __init__(self, count_uploads: Callable[[], int], count_waiting: Callable[[], int]) -> None:
        self.started = time.time()
        self.requests = RequestTable()
        self.demand = TenantDemand()
        self.history = RecentHistory()
        self._count_uploads = count_uploads
        self._count_waiting = count_waiting

    def record_answer(self, context: RequestContext, status: int, *, again: bool = False) -> None:
        """To be told of each request that could generate, at its end; `status` is what it ended
        with. `again` says that it was told of before, when it went on without its client."""
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
                # 429 is a limit's, and 499 the queue's where a client's deadline was too near.
                mistake = 400 <= status < 500 and status not in (429, 499)
                demand.count_refusal(tenant, context.refusal, mistake=mistake)
        if batch is None:
            return
        ended = EndedRequest(context, batch, status)
        totals.tokens += ended.completion_tokens
        if tenant is not None:
            demand.tokens[tenant] += ended.completion_tokens + ended.prompt_tokens
        if context.adapter_version is not None:
            demand.adapter_requests[selected_name(context.adapter_version)] += 1
        if ended.ttft_s is not None:
            self.history.first_tokens.add(ended.ttft_s)
        self.requests.end(ended)

    def count_busy(self, tenant: str, why: str, refused: int) -> None:
        """Count requests that were refused before anything was done for them.

        `tenant` is empty for strangers'.
        """
        self.history.totals.requests += refused
        self.history.totals.errors += refused
        if tenant:
            self.demand.requests[tenant] += refused
            self.demand.count_refusal(tenant, why, times=refused)

    def make_stops(self, context: RequestContext) -> Stops:
        """Of a request that leaves a generation for the first time."""
        ids = {
            "request_id": context.request_id,
            "trace_id": context.trace_id,
            "tenant": context.tenant,
            "replica": context.replica,
        }
        return Stops(partial(_log_stopped, ids))

    async def follow(self, troubles: Troubles) -> None:
        """Keeps the history; until cancelled."""
        while True:
            await asyncio.sleep(until_step_ends(time.time()))
            try:
                self._step()
            except Exception as error:  # nobody's request depends on it
                text = f"the last hour is not kept: {error!r}"
                troubles.hold("history", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("history")

    def _step(self) -> None:
        tokens = sum([watched.batch.meter.tokens_now for watched in self.requests])
        self.history.step(time.time(), tokens, self._count_uploads(), self._count_waiting())
        self.demand.step()
        self.requests.tidy()


def _log_stopped(ids: RequestIds, stops: Stops) -> None:
    """The engines have ended all that was left early of a request.

    A line of its own: the request's is written when its client has its answer or has left, which is
    before. Kept back until then, it would be lost with an engine that never tells.
    """
    level = logging.INFO if stops.reason in LOGGED_REASONS else logging.DEBUG
    if log.isEnabledFor(level):
        # What ends a stream is received on behalf of all requests, in none of their contexts.
        Context().run(_log, ids, stops, level)


def _log(ids: RequestIds, stops: Stops, level: int) -> None:
    current.set(RequestContext(ids["request_id"] or "-"))
    facts = stops.facts() | dict(ids)
    if (stop_ms := facts.get("stop_ms")) is None:
        log.log(level, "stopped (%s): no end was seen", stops.reason, extra={"facts": facts})
    else:
        words = "stopped (%s): the engine let go after %s ms"
        log.log(level, words, stops.reason, stop_ms, extra={"facts": facts})
