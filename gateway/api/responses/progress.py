"""Progress of a background response, in records that any gateway can read.

The records of a response form a group. Beside the response itself, the group contains a heartbeat
(`…/beat`). The worker that generates the response renews the heartbeat until the response ends. For
a streamed response, the group also contains the events, in chunks (`…/N`). If N is 70, the last
event of the chunk is the 70th event of the response. N is also the chunk's `Record.order`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from gateway.api.responses.stored import FINISHED, decode, encode, now_us
from gateway.conversations.record import Record
from gateway.conversations.store import Conversations

POLL_INTERVAL_S = 0.25
"""Interval in seconds at which a worker checks if its responses were cancelled, and if events are
due to be stored."""
BEAT_INTERVAL_S = 1.5
LEASE_S = 6.0
"""Age of a heartbeat in seconds, by the reader's clock, above which a response may be lost."""
DOUBT_PERIOD_S = 4.0
"""Seconds to wait before a response with an old heartbeat counts as lost. If the heartbeat changes
meanwhile, the response is not lost: clocks may differ, and the store may have been unavailable."""

# Values of `Record.version` for lost and cancelled responses. The highest version of a record wins.
# So a worker that finishes such a response late cannot replace the outcome that clients have seen.
LOST, CANCELLED = FINISHED + 1, FINISHED + 2

_CHUNK_BYTES = 64 * 1024
_DELETE_BATCH = 64
# Events are stored periodically, even if they do not fill a chunk. The interval grows with the age
# of the response: after n seconds, it is at least n / 1000 seconds. So a response that takes a day
# has about 7,000 such chunks. The store allows 10,000 records in a group (`MAX_MEMBERS`).
_MIN_GAP_SHARE = 1 / 1000
_EVENT_END = b"\n\n"
_LOST_MEMBERS: dict[str, Any] = {
    "status": "failed",
    "error": {
        "code": "server_error",
        "message": "The gateway that made this response has ended without a word.",
    },
}

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class Beat(NamedTuple):
    """The status of a response, and the Unix time in seconds at which the status was current."""

    status: Status
    at: float


def beat_id(response_id: str) -> str:
    return f"{response_id}/beat"


def beat_record(response_id: str, status: Status, version: int | None = None) -> Record:
    """Build a heartbeat record.

    For a finished response, `version` is the `Record.version` of both the response and the
    heartbeat. For an unfinished response, `version` is None. The heartbeat then gets the current
    time as its version, so that later heartbeats replace earlier ones.
    """
    data = orjson.dumps([status, time.time()])
    at = now_us() if version is None else version
    return Record(beat_id(response_id), data, at, response_id)


def read_beat(record: Record) -> Beat:
    return Beat(*orjson.loads(record.data))


def is_fresh(record: Record) -> bool:
    """Return True if the heartbeat is recent, by the clock of this process.

    The worker that wrote the heartbeat may have another clock, so the result may be wrong.
    """
    return abs(time.time() - read_beat(record).at) < LEASE_S


def chunk_record(response_id: str, frames: bytes, count: int) -> Record:
    """Build the record of a chunk of events.

    `count` is the number of events in this chunk and in all earlier chunks of the response.
    """
    return Record(f"{response_id}/{count}", frames, FINISHED, response_id, count)


def events_after(chunk: Record, sent: int) -> bytes:
    """Return the events of a chunk that follow the first `sent` events of the response."""
    frames = chunk.data.split(_EVENT_END)[:-1]
    already_sent = max(0, sent - (chunk.order - len(frames)))
    return b"".join([frame + _EVENT_END for frame in frames[already_sent:]])


def build_cancelled_records(record: Record) -> list[Record]:
    """Build the final records of a cancelled response: the response and its heartbeat.

    `record` is the stored record of the unfinished response.
    """
    return _build_final_records(record, CANCELLED, {"status": "cancelled"})


def build_lost_records(record: Record, events: int) -> list[Record]:
    """Build the final records of a response whose worker died: the response and its heartbeat.

    `record` is the stored record of the unfinished response. `events` is the number of stored
    events. If it is not 0, a chunk with the event `response.failed` is added to the records.
    """
    records = _build_final_records(record, LOST, _LOST_MEMBERS)
    if events:
        response = decode(records[0]).response
        event = {"type": "response.failed", "sequence_number": events, "response": response}
        frame = b"event: response.failed\ndata: " + orjson.dumps(event) + _EVENT_END
        records.append(chunk_record(record.id, frame, events + 1))
    return records


def _build_final_records(record: Record, version: int, members: dict[str, Any]) -> list[Record]:
    stored = decode(record)
    response, own = orjson.dumps(stored.response | members), orjson.dumps(stored.input)
    data = encode(response, own, stored.chain, stored.before, turned=False)
    beat = beat_record(record.id, members["status"], version)
    return [record._replace(data=data, version=version), beat]


class StoredEvents:
    """A `Body` that stores the events of a background response in chunks.

    `store` is the function that stores records. If it is None, no events are stored.

    The generation waits while too many bytes are not stored yet. Once the stored chunks have
    `max_bytes` bytes, each call of `write` drops all earlier events that are not stored yet. So
    only the events of the last call are still stored, and enough bytes are left to store the
    response itself.
    """

    def __init__(
        self,
        response_id: str,
        store: Callable[[Sequence[Record]], Awaitable[None]] | None,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._id = response_id
        self._store = store
        self._bytes_left = max_bytes
        self._clock = clock
        self._began_at = self._flushed_at = clock()
        self._pending = bytearray()
        self._count = 0
        self._flush_lock = asyncio.Lock()
        self._more = asyncio.Event()

    def write(self, data: bytes) -> bool:
        if self._store is None:
            return True
        self._count += data.count(_EVENT_END)
        if self._bytes_left <= 0:
            self._pending[:] = data
            return True
        self._pending += data
        return len(self._pending) < _CHUNK_BYTES

    async def drain(self, by: float | None = None) -> None:
        if len(self._pending) >= _CHUNK_BYTES:
            async with asyncio.timeout_at(by):
                await self.flush()

    async def flush_if_due(self) -> None:
        """Store the new events if enough time has passed since the last chunk was stored."""
        now = self._clock()
        if (
            self._bytes_left > 0
            and now - self._flushed_at >= (now - self._began_at) * _MIN_GAP_SHARE
        ):
            await self.flush()

    async def flush(
        self, store: Callable[[Sequence[Record]], Awaitable[None]] | None = None
    ) -> None:
        """Store the events that are not stored yet.

        If `store` is given, it is called instead of the function that was passed to the
        constructor, even if there are no new events. If storing raises an error, the events are
        retained for the next call of `flush`.
        """
        async with self._flush_lock:
            frames = bytes(self._pending)
            records = [chunk_record(self._id, frames, self._count)] if frames else []
            put = store or self._store
            if put is None or not (records or store):
                return
            self._pending.clear()
            try:
                await put(records)
            except BaseException:
                self._pending[:0] = frames
                raise
            self._flushed_at = self._clock()
            self._bytes_left -= sum([record.size for record in records])
            self.notify()

    async def wait_flushed(self) -> bool:
        """Wait for a running flush, then return True if any events were written."""
        async with self._flush_lock:
            return self._count > 0

    def notify(self) -> None:
        """Wake all waiters of `wait_for_more`."""
        self._more.set()
        self._more = asyncio.Event()

    async def wait_for_more(self) -> None:
        """Return when more events are stored, or after 1 s."""
        try:
            async with asyncio.timeout(1.0):
                await self._more.wait()
        except TimeoutError:
            pass


async def delete_events(conversations: Conversations, tenant: str, response_id: str) -> None:
    """Delete all stored events of a response. Raise the errors of `Conversations.delete`."""
    while chunks := await conversations.members(tenant, response_id, after=0, limit=_DELETE_BATCH):
        await conversations.delete(tenant, [chunk.id for chunk in chunks])
