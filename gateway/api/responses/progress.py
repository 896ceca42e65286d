"""How far a response is that is made in the background, in records that any gateway can read.

In the group of the response there are, beside its own record: one that says how it stands, renewed
by whoever makes it until somebody ends it (`…/beat`); and, where it is streamed, its events in
chunks (`…/N`), each at the place N: how many there are with them.
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
"""How often who makes a response looks whether it is to end, and whether to keep its new events."""
BEAT_INTERVAL_S = 1.5
LEASE_S = 6.0
"""Who has not said anything for so long, by the clock of who asks, may be dead."""
DOUBT_PERIOD_S = 4.0
"""Who then says nothing for so long is: clocks may differ, and a store may have been away."""

# Whatever of these is kept last: what somebody was told once stays so.
LOST, CANCELLED = FINISHED + 1, FINISHED + 2

_CHUNK_BYTES = 64 * 1024
_DELETE_BATCH = 64
# Smaller chunks are as far apart as a part of the time that the response has taken: of one that
# takes a day these are 7,000, where a group has room for 10,000 records.
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
    """How a response stood at a time, in seconds since 1970."""

    status: Status
    at: float


def beat_id(response_id: str) -> str:
    return f"{response_id}/beat"


def beat_record(response_id: str, status: Status, version: int | None = None) -> Record:
    """`version` is that of a response that has come to its end."""
    data = orjson.dumps([status, time.time()])
    at = now_us() if version is None else version
    return Record(beat_id(response_id), data, at, response_id)


def read_beat(record: Record) -> Beat:
    return Beat(*orjson.loads(record.data))


def is_fresh(record: Record) -> bool:
    """Whether who said so is surely alive, if its clock and ours are alike."""
    return abs(time.time() - read_beat(record).at) < LEASE_S


def chunk_record(response_id: str, frames: bytes, count: int) -> Record:
    """`count` events there are with these."""
    return Record(f"{response_id}/{count}", frames, FINISHED, response_id, count)


def events_after(chunk: Record, sent: int) -> bytes:
    """Of a chunk the events behind the first `place` of the response."""
    frames = chunk.data.split(_EVENT_END)[:-1]
    already_sent = max(0, sent - (chunk.order - len(frames)))
    return b"".join([frame + _EVENT_END for frame in frames[already_sent:]])


def build_cancelled_records(record: Record) -> list[Record]:
    """What is kept of an unfinished response that somebody has ended."""
    return _build_final_records(record, CANCELLED, {"status": "cancelled"})


def build_lost_records(record: Record, events: int) -> list[Record]:
    """Of one whose maker is gone; `events` are those that were kept, 0 where it is not streamed."""
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
    """A `Body` that keeps what is written in chunks; with `keep` None it keeps nothing.

    Whoever makes the response waits where too much is not kept yet. Those beyond `room` bytes of
    chunks are left out, but for what is written last: an answer is not lost for its events.
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
        """As `flush`, if it is time for the next chunk."""
        now = self._clock()
        if (
            self._bytes_left > 0
            and now - self._flushed_at >= (now - self._began_at) * _MIN_GAP_SHARE
        ):
            await self.flush()

    async def flush(
        self, store: Callable[[Sequence[Record]], Awaitable[None]] | None = None
    ) -> None:
        """Keeps what is new, by `keep` if given, which is then called in any case.

        Raises what that raises; nothing is lost then.
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
        """Whether any were written; returns once none is on its way any more."""
        async with self._flush_lock:
            return self._count > 0

    def notify(self) -> None:
        """Wakes who waits for news."""
        self._more.set()
        self._more = asyncio.Event()

    async def wait_for_more(self) -> None:
        """Returns when more is kept, or in a moment in any case."""
        try:
            async with asyncio.timeout(1.0):
                await self._more.wait()
        except TimeoutError:
            pass


async def delete_events(conversations: Conversations, tenant: str, response_id: str) -> None:
    """All that are kept of a response. Raises what `Conversations.delete` raises."""
    while chunks := await conversations.members(tenant, response_id, after=0, limit=_DELETE_BATCH):
        await conversations.delete(tenant, [chunk.id for chunk in chunks])
