"""Reading, cancellation and deletion of background responses that are not finished.

Any worker of any gateway may generate the response.

See decision 071 in docs/decisions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gateway.api.responses.background import BackgroundRun
from gateway.api.responses.progress import (
    DOUBT_PERIOD_S,
    POLL_INTERVAL_S,
    Status,
    beat_id,
    build_cancelled_records,
    build_lost_records,
    delete_events,
    events_after,
    is_fresh,
    read_beat,
)
from gateway.api.responses.stored import FINISHED, is_response_id, turns_id
from gateway.api.sse import OPENAI, EventBody
from gateway.conversations.record import Record
from gateway.errors import InvalidRequest, NotFound, Overloaded
from gateway.service import Service

# Limits of one tenant's streams in one process. If there are more than 8 streams, each polls less
# often, so that one tenant cannot saturate Redis: a poll takes Redis about 0.3 ms.
_MAX_FOLLOWERS = 64
_MAX_POLLS_PER_S = 32
_CHUNKS_AT_ONCE = 4


class UnfinishedResponses:
    """The unfinished background responses of all gateways, as they are seen from one process.

    `runs` are the responses that are generated in this process, by id.
    """

    def __init__(self, service: Service, runs: Mapping[str, BackgroundRun]) -> None:
        self._service = service
        self._conversations = service.conversations
        self._runs = runs
        self._followers: Counter[str] = Counter()

    async def find(self, tenant: str, response_id: str) -> tuple[Record, Status | None]:
        """Return a response's record, and its status if it is not finished.

        A response whose worker died is marked as failed. Raise NotFound if there is no response of
        that id.
        """
        doubted: Record | None = None
        while True:
            [record] = await self._conversations.get(tenant, [response_id])
            if record is None or not is_response_id(response_id):
                raise NotFound(f"Response with id '{response_id}' not found.")
            if record.version >= FINISHED:
                return record, None
            if (run := self._runs.get(response_id)) is not None:
                return record, run.status
            # Read the heartbeat as the last step: only background responses have one, and reading a
            # missing record can be slow.
            [beat] = await self._conversations.get(tenant, [beat_id(response_id)])
            if beat is not None and beat.version >= FINISHED:
                if beat != doubted:  # the response ended between the two reads: read again
                    doubted = beat
                    continue
            elif beat is not None and (is_fresh(beat) or doubted not in (None, beat)):
                return record, read_beat(beat).status
            doubtful = beat or record
            if doubtful == doubted:
                events = await self._count_events(tenant, response_id)
                await self._end(tenant, record, partial(build_lost_records, events=events))
            else:
                doubted = doubtful
                await asyncio.sleep(DOUBT_PERIOD_S)

    async def cancel(self, tenant: str, record: Record) -> None:
        """Cancel an unfinished response.

        The response's record changes at once. The worker that generates the response stops soon
        after.
        """
        await self._end(tenant, record, build_cancelled_records)
        self._stop(tenant, record.id)

    async def _end(
        self, tenant: str, record: Record, build_records: Callable[[Record], Sequence[Record]]
    ) -> None:
        turns = self._service.prompts.threads
        await self._conversations.put(
            tenant, await turns.run(tenant, len(record.data), partial(build_records, record))
        )

    async def delete(self, tenant: str, record: Record) -> None:
        """Delete a response and its events, and stop its generation."""
        self._stop(tenant, record.id)
        await self._conversations.delete(
            tenant, [record.id, beat_id(record.id), turns_id(record.id)]
        )
        await delete_events(self._conversations, tenant, record.id)

    def _stop(self, tenant: str, response_id: str) -> None:
        run = self._runs.get(response_id)
        if run is not None and run.tenant == tenant:
            run.cancel()

    async def _count_events(self, tenant: str, response_id: str) -> int:
        """Return the number of stored events of a response."""
        count = 0
        while chunks := await self._conversations.members(
            tenant, response_id, after=count, limit=_CHUNKS_AT_ONCE
        ):
            count = chunks[-1].order
        return count

    async def replay(
        self,
        tenant: str,
        response_id: str,
        sent: int,
        slots: asyncio.Semaphore,
        body: EventBody,
    ) -> None:
        """Write a response's events after the first `sent`, then future events as they arrive.

        Raises:
            NotFound: The response does not exist.
            InvalidRequest: The response has no stored events.
            Overloaded: The tenant already follows too many streams at this worker.
        """
        if self._followers[tenant] >= _MAX_FOLLOWERS:
            raise Overloaded(
                f"{_MAX_FOLLOWERS} streams of this key follow responses in the background at this "
                f"worker; allowed: {_MAX_FOLLOWERS}. Close one, or poll the response."
            )
        self._followers[tenant] += 1
        try:
            await self._follow(tenant, response_id, sent, slots, body)
        finally:
            self._followers[tenant] -= 1
            if not self._followers[tenant]:
                del self._followers[tenant]

    def _poll_interval_s(self, tenant: str) -> float:
        """Return the seconds between polls of a stream whose response another worker generates."""
        return max(POLL_INTERVAL_S, self._followers[tenant] / _MAX_POLLS_PER_S)

    async def _follow(
        self,
        tenant: str,
        response_id: str,
        sent: int,
        slots: asyncio.Semaphore,
        body: EventBody,
    ) -> None:
        async with slots:
            if not await self._conversations.members(tenant, response_id, after=0, limit=1):
                raise InvalidRequest(
                    "stream: the events of a response are stored if it was made with "
                    "`background` and `stream`.",
                    param="stream",
                )
        body.start_keep_alive()
        loop, patience_s = asyncio.get_running_loop(), self._service.settings.keep_alive
        written = loop.time()
        finished = False
        while True:
            async with slots:
                chunks = await self._conversations.members(
                    tenant, response_id, after=sent, limit=_CHUNKS_AT_ONCE
                )
            for chunk in chunks:
                body.write(events_after(chunk, sent))
                await body.drain()
                sent = chunk.order
            if chunks:
                written = loop.time()
                continue
            if finished:
                return
            # After its first frame, the `EventBody` sends no more keep-alive frames by itself. So
            # send one here if no event was written for `patience_s` seconds.
            if loop.time() - written >= patience_s:
                body.write(OPENAI.keep_alive)
                await body.drain()
                written = loop.time()
            if (run := self._runs.get(response_id)) is not None:
                await run.events.wait_for_more()
                continue
            # Poll the heartbeat, not the response, which may be megabytes. A final heartbeat means
            # that all events are stored, so read the events once more before the stream ends.
            [beat] = await self._conversations.get(tenant, [beat_id(response_id)])
            finished = beat is not None and beat.version >= FINISHED
            if not finished:
                if beat is None or not is_fresh(beat):
                    async with slots:
                        await self.find(tenant, response_id)
                await asyncio.sleep(self._poll_interval_s(tenant))
