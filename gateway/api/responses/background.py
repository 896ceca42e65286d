"""Responses that are made in the background: by a task of this worker, told of by any."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import orjson

from gateway.api.failures import status_of
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.keeping import Keeping
from gateway.api.responses.progress import (
    BEAT_S,
    DOUBT_S,
    LOOK_S,
    Events,
    Status,
    after,
    beat_id,
    beat_record,
    cancelled,
    is_fresh,
    lost,
    read_beat,
)
from gateway.api.responses.stored import FINISHED, is_response_id, turns_id
from gateway.api.serving import Prepared
from gateway.api.sse import OPENAI, EventBody, told
from gateway.conversations.record import Record
from gateway.errors import (
    ClientDisconnected,
    ConversationTooLarge,
    GatewayError,
    InvalidRequest,
    NotFound,
    Overloaded,
    ShuttingDown,
)
from gateway.observability.logs import log_request
from gateway.observability.request_context import RequestContext
from gateway.pipeline.generate import generate
from gateway.service import Service

log = logging.getLogger("gateway.requests")

# Of one tenant in one process, where `concurrent_requests` does not say fewer.
_MOST_RUNNING = 256
_MOST_FOLLOWERS = 64
_ENDING_S = 2.0
_CHUNKS_AT_ONCE = 4
_DELETED_AT_ONCE = 64


@dataclass(eq=False, slots=True)
class Run:
    """One response that is being made here."""

    id: str
    tenant: str
    keeping: Keeping
    events: Events
    status: Status = "queued"
    beaten: float = 0.0
    cancelled: bool = False
    task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.status = "in_progress"
        self.beaten = 0.0

    def cancel(self) -> None:
        """Somebody wants it to end, or has been told that it has."""
        if self.task is not None and not self.cancelled:
            self.cancelled = True
            self.task.cancel()


class Background:
    """Those of one process. Use as an async context manager."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._kept = service.conversations
        self._runs: dict[str, Run] = {}
        self._followers: Counter[str] = Counter()
        self._draining: float | None = None

    async def __aenter__(self) -> Background:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """What runs has what is left of the grace that all requests have."""
        settings = self._service.settings
        grace = settings.drain_seconds + settings.shutdown_grace
        if self._draining is not None:
            grace -= time.monotonic() - self._draining
        if tasks := [run.task for run in self._runs.values() if run.task is not None]:
            await asyncio.wait(tasks, timeout=max(grace, 0.0))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_ENDING_S)
        self._watching.cancel()
        await asyncio.wait([self._watching])

    def check_room(self, tenant: str) -> None:
        """For one more. Raises Overloaded."""
        if sum([run.tenant == tenant for run in self._runs.values()]) >= _MOST_RUNNING:
            raise Overloaded("Too many responses of this key are made in the background.")

    async def begin(self, request: RequestContext, ready: Prepared, keeping: Keeping) -> str:
        """The id of a response that is made from now on, and can be asked for.

        Raises what `Conversations.put` raises.
        """
        answer = ready.answer
        assert isinstance(answer, ResponseAnswer)
        keep = partial(self._kept.put, keeping.tenant) if ready.stream else None
        # The other half is for the response itself.
        events = Events(answer.id, keep, self._service.settings.conversations_bytes // 2)
        run = Run(answer.id, keeping.tenant, keeping, events)
        # What it takes is told at its end, in a line of its own.
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
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        run.task = asyncio.create_task(self._make(run, answer, ready, context, kept))
        await asyncio.shield(kept)  # who has left by then has begun it all the same
        return run.id

    async def _make(
        self,
        run: Run,
        answer: ResponseAnswer,
        ready: Prepared,
        context: RequestContext,
        kept: asyncio.Future[None],
    ) -> None:
        sink = answer.stream(run.events, "none")
        try:
            async with ready.account:
                try:
                    # Others may have begun since it was looked at.
                    self.check_room(run.tenant)
                    self._runs[run.id] = run
                    run.events.write(answer.queued())
                    await self._put(run, answer.response("queued"), "queued")
                    kept.set_result(None)
                    await generate(self._service, context, ready.batch, sink, on_place=run.begin)
                    response, last = answer.held
                    run.events.write(last)
                    await self._put(run, response, orjson.loads(response)["status"], FINISHED)
                except asyncio.CancelledError:
                    if run.task is not None:
                        run.task.uncancel()
                    raise _why(run) from None
        except Exception as error:  # whatever it is, the record must not say for ever that it runs
            if not kept.done():
                kept.set_exception(error)
                return
            context.error, context.late_status = type(error), status_of(error)
            if not run.cancelled:
                await self._fail(run, answer, error)
        finally:
            self._runs.pop(run.id, None)
            run.events.tell()
            if kept.done() and kept.exception() is None:
                status = context.late_status or 200
                log_request(log, context.facts("POST", context.path, status))
                self._service.monitor.answered(context, status, again=True)
                await self._clear(run)

    async def _clear(self, run: Run) -> None:
        """Events may have been on their way to the store while their response was deleted: no
        later deletion would reach them."""
        if not await run.events.ended():
            return
        try:
            [beat] = await self._kept.get(run.tenant, [beat_id(run.id)])
            if beat is None:
                await self._delete_events(run.tenant, run.id)
        except GatewayError as error:
            log.error("events of %s may be left of it: %s", run.id, error.message)

    async def _fail(self, run: Run, answer: ResponseAnswer, error: Exception) -> None:
        run.events.write(answer.wire().failure(told(error)))
        try:
            await self._put(run, answer.held[0], "failed", FINISHED)
        except GatewayError as worse:  # then it is told as lost, once its lease is over
            log.error("%s has failed, which could not be kept: %s", run.id, worse.message)

    async def _put(
        self, run: Run, response: bytes, status: Status, version: int | None = None
    ) -> None:
        async def keep(events: Sequence[Record]) -> None:
            beat = beat_record(run.id, status, version)
            await run.keeping.put(response, version or 1, *events, beat)

        await run.events.flush(keep)
        run.beaten = time.monotonic()

    async def _watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._service.replicas.draining and self._draining is None:
                self._draining = time.monotonic()
            runs = defaultdict[str, list[Run]](list)
            for run in self._runs.values():
                if run.beaten or run.status == "in_progress":  # its record is there
                    runs[run.tenant].append(run)
            await asyncio.gather(*[self._look_after(name, own) for name, own in runs.items()])

    async def _look_after(self, tenant: str, runs: Sequence[Run]) -> None:
        for work in (self._tell, self._listen, _keep_events):
            try:
                await work(tenant, runs)
            except GatewayError as error:
                log.warning("responses in the background are not told of: %s", error.message)
            except Exception:  # whatever is wrong, the others must be looked after
                log.exception("responses in the background are not looked after")

    async def _tell(self, tenant: str, runs: Sequence[Run]) -> None:
        now = time.monotonic()
        if due := [run for run in runs if now - run.beaten >= BEAT_S]:
            await self._beat(tenant, due)
            for run in due:
                run.beaten = now

    async def _beat(self, tenant: str, runs: Sequence[Run]) -> None:
        try:
            await self._kept.put(tenant, [beat_record(run.id, run.status) for run in runs])
        except ConversationTooLarge as error:
            if len(runs) > 1:  # the others must not pass for dead
                for run in runs:
                    await self._beat(tenant, [run])
            else:
                log.warning("%s is not told of: %s", runs[0].id, error.message)

    async def _listen(self, tenant: str, runs: Sequence[Run]) -> None:
        """Others end a response by what they keep in the place of its beat."""
        beats = await self._kept.get(tenant, [beat_id(run.id) for run in runs])
        for run, beat in zip(runs, beats, strict=True):
            if beat is None or beat.version > FINISHED:
                run.cancel()

    async def find(self, tenant: str, response_id: str) -> tuple[Record, Status | None]:
        """A response's record and, while it is not finished, how it stands.

        One whose maker has died has failed from then on. Raises NotFound.
        """
        doubted: Record | None = None
        while True:
            [record] = await self._kept.get(tenant, [response_id])
            if record is None or not is_response_id(response_id):
                raise NotFound(f"Response with id '{response_id}' not found.")
            if record.version >= FINISHED:
                return record, None
            if (run := self._runs.get(response_id)) is not None:
                return record, run.status
            # Of what was never in the background there is none, and to miss one may take time.
            [beat] = await self._kept.get(tenant, [beat_id(response_id)])
            if beat is not None and beat.version >= FINISHED:
                if beat != doubted:  # it has ended between
                    doubted = beat
                    continue
            elif beat is not None and (is_fresh(beat) or doubted not in (None, beat)):
                return record, read_beat(beat).status
            doubtful = beat or record
            if doubtful == doubted:
                events = await self._events(tenant, response_id)
                await self._end(tenant, record, partial(lost, events=events))
            else:
                doubted = doubtful
                await asyncio.sleep(DOUBT_S)

    async def cancel(self, tenant: str, record: Record) -> None:
        """Ends an unfinished response: what is told of it at once, what is done for it soon."""
        await self._end(tenant, record, cancelled)
        self._stop(tenant, record.id)

    async def _end(
        self, tenant: str, record: Record, how: Callable[[Record], Sequence[Record]]
    ) -> None:
        turns = self._service.prompts.turns
        await self._kept.put(
            tenant, await turns.run(tenant, len(record.data), partial(how, record))
        )

    async def delete(self, tenant: str, record: Record) -> None:
        """With its events; one that is still made is not made any further."""
        self._stop(tenant, record.id)
        await self._kept.delete(tenant, [record.id, beat_id(record.id), turns_id(record.id)])
        await self._delete_events(tenant, record.id)

    async def _delete_events(self, tenant: str, response_id: str) -> None:
        while chunks := await self._kept.members(
            tenant, response_id, after=0, limit=_DELETED_AT_ONCE
        ):
            await self._kept.delete(tenant, [chunk.id for chunk in chunks])

    def _stop(self, tenant: str, response_id: str) -> None:
        run = self._runs.get(response_id)
        if run is not None and run.tenant == tenant:
            run.cancel()

    async def _events(self, tenant: str, response_id: str) -> int:
        """How many are kept."""
        place = 0
        while chunks := await self._kept.members(
            tenant, response_id, after=place, limit=_CHUNKS_AT_ONCE
        ):
            place = chunks[-1].order
        return place

    async def replay(
        self,
        tenant: str,
        response_id: str,
        place: int,
        look: AbstractAsyncContextManager[object],
        body: EventBody,
    ) -> None:
        """Writes the events behind the first `place`, those that are still to come as they come.

        Raises NotFound, InvalidRequest where none are kept, and Overloaded.
        """
        if self._followers[tenant] >= _MOST_FOLLOWERS:
            raise Overloaded("Too many streams of this key follow responses in the background.")
        self._followers[tenant] += 1
        try:
            await self._follow(tenant, response_id, place, look, body)
        finally:
            self._followers[tenant] -= 1

    async def _follow(
        self,
        tenant: str,
        response_id: str,
        place: int,
        look: AbstractAsyncContextManager[object],
        body: EventBody,
    ) -> None:
        async with look:
            if not await self._kept.members(tenant, response_id, after=0, limit=1):
                raise InvalidRequest(
                    "stream: the events of a response are kept where it was made with "
                    "`background` and `stream`.",
                    param="stream",
                )
        body.expect()
        loop, patience_s = asyncio.get_running_loop(), self._service.settings.keep_alive
        written = loop.time()
        finished = False
        while True:
            async with look:
                chunks = await self._kept.members(
                    tenant, response_id, after=place, limit=_CHUNKS_AT_ONCE
                )
            for chunk in chunks:
                body.write(after(chunk, place))
                await body.drain()
                place = chunk.order
            if chunks:
                written = loop.time()
                continue
            if finished:
                return
            # The body is patient from its first events on, which may be long before the next ones.
            if loop.time() - written >= patience_s:
                body.write(OPENAI.patience)
                await body.drain()
                written = loop.time()
            if (run := self._runs.get(response_id)) is not None:
                await run.events.news()
                continue
            # Once it is, its last events are there too, and are read once more. The response itself
            # may be megabytes.
            [beat] = await self._kept.get(tenant, [beat_id(response_id)])
            finished = beat is not None and beat.version >= FINISHED
            if not finished:
                if beat is None or not is_fresh(beat):
                    async with look:
                        await self.find(tenant, response_id)
                await asyncio.sleep(LOOK_S)


async def _keep_events(_: str, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.cancelled:
            continue
        try:
            await run.events.flush_in_time()
        except ConversationTooLarge as error:  # this one has no room; the others may have
            log.warning("events of %s are not kept: %s", run.id, error.message)


def _why(run: Run) -> Exception:
    """What a response ends with whose task was cancelled."""
    if run.cancelled:
        return ClientDisconnected()
    return ShuttingDown("The gateway has ended before the response was complete.")
