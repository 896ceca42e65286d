"""Facts about a request that the console shows, while the request runs and after its end."""

from __future__ import annotations

import asyncio
import time

from gateway.generation.batch import Batch
from gateway.observability.request_context import RequestContext

_MAX_FINISH_REASONS = 16


class WatchedRequest:
    """A running request. `state` and `facts` compute the present values when they are called.

    `id` is a unique id from the gateway. The `x-request-id` may not be unique, because clients
    choose it.
    """

    __slots__ = ("_task", "batch", "context", "started")

    def __init__(self, context: RequestContext, batch: Batch) -> None:
        self.context = context
        self.batch = batch
        self.started = time.time()
        self._task = asyncio.current_task()

    @property
    def id(self) -> str:
        return self.batch.request_id

    @property
    def state(self) -> str:
        if self.context.left_at is not None:
            return "stopping"
        return "queued" if self.context.replica is None else "running"

    def cancel(self) -> None:
        """Cancel the request on behalf of an admin, as if its client had disconnected."""
        if self._task is not None and self.context.left_at is None:
            self.context.cancelled = True
            self.context.left_at = time.perf_counter()
            self._task.cancel()

    def consume_cancellation(self) -> bool:
        """Return True if `cancel` has cancelled the request's task.

        If so, also call `Task.uncancel`, so that asyncio does not regard the task as cancelled.
        """
        if not self.context.cancelled or self._task is None:
            return False
        self._task.uncancel()
        return True

    def facts(self) -> dict[str, object]:
        context = self.context
        facts: dict[str, object] = {
            "request_id": context.request_id,
            "tenant": self.batch.caller.tenant,
            "model": context.adapter_version or context.model or "",
            "path": context.path,
            "state": self.state,
            "started": round(self.started, 2),
            "prompt_tokens": self.batch.prompt_tokens,
            "completion_tokens": self.batch.meter.tokens_now,
        }
        if context.replica is not None:
            facts["replica"] = context.replica
        return facts


class RequestSummary:
    """Summary of a request that has ended, without prompt or response."""

    __slots__ = (
        "at",
        "completion_tokens",
        "error",
        "finished",
        "id",
        "model",
        "path",
        "prompt_tokens",
        "replica",
        "request_id",
        "started",
        "status",
        "stops",
        "tenant",
        "ttft_s",
    )

    def __init__(self, context: RequestContext, batch: Batch, status: int) -> None:
        meter = batch.meter
        self.id = batch.request_id
        self.request_id = context.request_id
        self.tenant = batch.caller.tenant
        self.model = context.adapter_version or context.model or ""
        self.path = context.path
        self.replica = context.replica
        self.at = time.time()
        self.started = self.at - (time.perf_counter() - context.started)
        self.status = status
        self.error = context.error
        self.prompt_tokens = batch.prompt_tokens
        self.completion_tokens = meter.tokens
        self.finished = meter.finished
        self.stops = meter.stops
        first = meter.first_token
        self.ttft_s = None if first is None else first - context.started

    @property
    def stopping(self) -> bool:
        """True if an engine may still be working on the request."""
        return self.stops is not None and self.stops.open > 0

    def facts(self) -> dict[str, object]:
        """Return the same facts as `WatchedRequest.facts`, except the state of the request.

        `outcome` returns the facts about the end of the request.
        """
        facts: dict[str, object] = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "model": self.model,
            "path": self.path,
            "started": round(self.started, 2),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.replica is not None:
            facts["replica"] = self.replica
        return facts

    def outcome(self) -> dict[str, object]:
        """Return the fields about the end of the request, such as its status."""
        facts: dict[str, object] = {"ended": round(self.at, 2), "status": self.status}
        if self.finished:
            facts["finish"] = self.finished[:_MAX_FINISH_REASONS]
        if self.error is not None:
            facts["error"] = self.error.__name__
        if self.ttft_s is not None:
            facts["ttft_ms"] = round(self.ttft_s * 1000, 1)
        if self.stops is not None and not self.stops.open:
            facts |= self.stops.facts()
        return facts
