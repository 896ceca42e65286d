"""Background responses, which run as asyncio tasks of this worker process.

See decision 071 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import orjson

from gateway.api.failures import status_of
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.keeping import StorePlan
from gateway.api.responses.progress import (
    BEAT_INTERVAL_S,
    POLL_INTERVAL_S,
    Status,
    StoredEvents,
    beat_id,
    beat_record,
    delete_events,
)
from gateway.api.responses.stored import FINISHED
from gateway.api.serving import PreparedRequest
from gateway.api.sse import to_failure
from gateway.conversations.record import Record
from gateway.errors import (
    ClientDisconnected,
    ConversationTooLarge,
    GatewayError,
    Overloaded,
    ShuttingDown,
)
from gateway.observability.logs import log_request
from gateway.observability.request_context import RequestContext
from gateway.pipeline.generate import generate
from gateway.service import Service

log = logging.getLogger("gateway.requests")

# Maximum number of a tenant's running responses per process. `concurrent_requests` may allow fewer.
_MAX_RUNNING_PER_TENANT = 256
_CANCEL_TIMEOUT_S = 2.0


@dataclass(eq=False, slots=True)
class BackgroundRun:
    """A background response that runs in this worker."""

    id: str
    tenant: str
    plan: StorePlan
    events: StoredEvents
    status: Status = "queued"
    beat_at: float = 0.0
    cancelled: bool = False
    task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.status = "in_progress"
        self.beat_at = 0.0

    def cancel(self) -> None:
        """Stop the task, because the response was cancelled, deleted or reported as lost."""
        if self.task is not None and not self.cancelled:
            self.cancelled = True
            self.task.cancel()


class BackgroundResponses:
    """The background responses of one process. Use as an async context manager."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._conversations = service.conversations
        self.runs: dict[str, BackgroundRun] = {}
        """The responses that run in this process, by id."""
        self._draining_since: float | None = None

    async def __aenter__(self) -> BackgroundResponses:
        self._watch_task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the running responses, then cancel those that have not ended.

        The wait lasts at most the drain time plus the shutdown grace period. The time since
        draining began counts toward this limit.
        """
        settings = self._service.settings
        grace = settings.drain_seconds + settings.shutdown_grace
        if self._draining_since is not None:
            grace -= time.monotonic() - self._draining_since
        if tasks := [run.task for run in self.runs.values() if run.task is not None]:
            await asyncio.wait(tasks, timeout=max(grace, 0.0))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)
        self._watch_task.cancel()
        await asyncio.wait([self._watch_task])

    def check_capacity(self, tenant: str) -> None:
        """Raise Overloaded if the tenant already runs as many background responses as allowed."""
        if sum([run.tenant == tenant for run in self.runs.values()]) >= _MAX_RUNNING_PER_TENANT:
            raise Overloaded("Too many responses of this key are made in the background.")

    async def begin(self, request: RequestContext, ready: PreparedRequest, plan: StorePlan) -> str:
        """Start a background response and return its id once the response is stored as queued.

        Raise the errors of `Conversations.put`. Raise Overloaded if too many background responses
        of the tenant already run in this process.
        """
        answer = ready.answer
        assert isinstance(answer, ResponseAnswer)
        store = partial(self._conversations.put, plan.tenant) if ready.stream else None
        # Limit the stored events to half of the bytes that the tenant may store. The other half is
        # left for the response object.
        events = StoredEvents(answer.id, store, self._service.settings.conversations_bytes // 2)
        run = BackgroundRun(answer.id, plan.tenant, plan, events)
        # Log the generation separately at its end, not with this HTTP request.
        context = RequestContext(
            request.request_id,
            parent=request.parent,
            tenant=request.tenant,
            model=request.model,
            adapter_version=request.adapter_version,
            batch=ready.batch,
            path=request.path,
        )
        request.batch = None
        queued: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        run.task = asyncio.create_task(self._run(run, answer, ready, context, queued))
        await asyncio.shield(queued)  # start the response even if the client disconnects
        return run.id

    async def _run(
        self,
        run: BackgroundRun,
        answer: ResponseAnswer,
        ready: PreparedRequest,
        context: RequestContext,
        queued: asyncio.Future[None],
    ) -> None:
        sink = answer.stream(run.events, "none")
        try:
            async with ready.account:
                try:
                    # Check again, as other responses may have started since the first check.
                    self.check_capacity(run.tenant)
                    self.runs[run.id] = run
                    run.events.write(answer.build_queued_events())
                    await self._store(run, answer.build_response("queued"), "queued")
                    queued.set_result(None)
                    await generate(self._service, context, ready.batch, sink, on_slot=run.begin)
                    response, last = answer.final_response_and_event
                    run.events.write(last)
                    await self._store(run, response, orjson.loads(response)["status"], FINISHED)
                except asyncio.CancelledError:
                    if run.task is not None:
                        run.task.uncancel()
                    raise _cancellation_error(run) from None
        # Catch any error, so that `_fail` can store the status `failed`. Without this status,
        # clients would see a running response until its heartbeat is too old.
        except Exception as error:
            if not queued.done():
                queued.set_exception(error)
                return
            context.error, context.late_status = type(error), status_of(error)
            if not run.cancelled:
                await self._fail(run, answer, error)
        finally:
            self.runs.pop(run.id, None)
            run.events.notify()
            if queued.done() and queued.exception() is None:
                status = context.late_status or 200
                log_request(log, context.facts("POST", context.path, status))
                self._service.monitor.record_answer(context, status, again=True)
                await self._delete_stray_events(run)

    async def _delete_stray_events(self, run: BackgroundRun) -> None:
        """Delete events that were stored after their response was deleted.

        The deletion of the response has not found these events, so they would stay in the store.
        """
        if not await run.events.wait_flushed():
            return
        try:
            [beat] = await self._conversations.get(run.tenant, [beat_id(run.id)])
            if beat is None:
                await delete_events(self._conversations, run.tenant, run.id)
        except GatewayError as error:
            log.error("events of %s may be left of it: %s", run.id, error.message)

    async def _fail(self, run: BackgroundRun, answer: ResponseAnswer, error: Exception) -> None:
        run.events.write(answer.wire().failure(to_failure(error)))
        try:
            await self._store(run, answer.final_response_and_event[0], "failed", FINISHED)
        # Only log this error: once the heartbeat is too old, the response is reported as lost.
        except GatewayError as worse:
            log.error("%s has failed, which could not be stored: %s", run.id, worse.message)

    async def _store(
        self, run: BackgroundRun, response: bytes, status: Status, version: int | None = None
    ) -> None:
        async def store(events: Sequence[Record]) -> None:
            beat = beat_record(run.id, status, version)
            await run.plan.store(response, version or 1, *events, beat)

        await run.events.flush(store)
        run.beat_at = time.monotonic()

    async def _watch(self) -> None:
        """Renew heartbeats, apply cancellations and store new events of the running responses.

        This coroutine runs until its task is cancelled.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if self._service.replicas.draining and self._draining_since is None:
                self._draining_since = time.monotonic()
            runs = defaultdict[str, list[BackgroundRun]](list)
            for run in self.runs.values():
                if run.beat_at or run.status == "in_progress":  # skip if no record is stored yet
                    runs[run.tenant].append(run)
            await asyncio.gather(*[self._maintain(name, own) for name, own in runs.items()])

    async def _maintain(self, tenant: str, runs: Sequence[BackgroundRun]) -> None:
        for work in (self._renew_beats, self._cancel_ended, _store_events):
            try:
                await work(tenant, runs)
            except GatewayError as error:
                log.warning("heartbeats of background responses are not written: %s", error.message)
            except Exception:  # Catch any error: other tenants must still be served
                log.exception("heartbeats of background responses failed")

    async def _renew_beats(self, tenant: str, runs: Sequence[BackgroundRun]) -> None:
        now = time.monotonic()
        if due := [run for run in runs if now - run.beat_at >= BEAT_INTERVAL_S]:
            await self._put_beats(tenant, due)
            for run in due:
                run.beat_at = now

    async def _put_beats(self, tenant: str, runs: Sequence[BackgroundRun]) -> None:
        try:
            await self._conversations.put(tenant, [beat_record(run.id, run.status) for run in runs])
        except ConversationTooLarge as error:
            if len(runs) > 1:  # retry each alone: otherwise the other runs would appear dead
                for run in runs:
                    await self._put_beats(tenant, [run])
            else:
                log.warning("heartbeat of %s is not written: %s", runs[0].id, error.message)

    async def _cancel_ended(self, tenant: str, runs: Sequence[BackgroundRun]) -> None:
        """Cancel the responses that another worker has cancelled, deleted or reported as lost.

        The other worker has deleted the response's heartbeat record, or has written a heartbeat
        with the version `LOST` or `CANCELLED`.
        """
        beats = await self._conversations.get(tenant, [beat_id(run.id) for run in runs])
        for run, beat in zip(runs, beats, strict=True):
            if beat is None or beat.version > FINISHED:
                run.cancel()


async def _store_events(_: str, runs: Sequence[BackgroundRun]) -> None:
    for run in runs:
        if run.cancelled:
            continue
        try:
            await run.events.flush_if_due()
        # This error means that the tenant must not store more bytes for this response's events. Log
        # the error and continue with the next response.
        except ConversationTooLarge as error:
            log.warning("events of %s are not stored: %s", run.id, error.message)


def _cancellation_error(run: BackgroundRun) -> Exception:
    """Return the error that ends a response whose task was cancelled."""
    if run.cancelled:
        return ClientDisconnected()
    return ShuttingDown("The gateway has ended before the response was complete.")
