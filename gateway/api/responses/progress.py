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

from gateway.api.responses.stored import FINISHED, decode, encode, microseconds
from gateway.conversations.record import Record
from gateway.conversations.store import Conversations

LOOK_S = 0.25
"""How often who makes a response looks whether it is to end, and whether to keep its new events."""
BEAT_S = 1.5
LEASE_S = 6.0
"""Who has not said anything for so long, by the clock of who asks, may be dead."""
DOUBT_S = 4.0
"""Who then says nothing for so long is: clocks may differ, and a store may have been away."""

# Whatever of these is kept last: what somebody was told once stays so.
LOST, CANCELLED = FINISHED + 1, FINISHED + 2

_CHUNK = 64 * 1024
_DELETED_AT_ONCE = 64
# Smaller chunks are as far apart as a part of the time that the response has taken: of one that
# takes a day these are 7,000, where a group has room for 10,000 records.
_PART = 1 / 1000
_END = b"\n\n"
_LOST: dict[str, Any] = {
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
    at = microseconds() if version is None else version
    return Record(beat_id(response_id), data, at, response_id)


def read_beat(record: Record) -> Beat:
    return Beat(*orjson.loads(record.data))


def is_fresh(record: Record) -> bool:
    """Whether who said so is surely alive, if its clock and ours are alike."""
    return abs(time.time() - read_beat(record).at) < LEASE_S


def chunk_record(response_id: str, frames: bytes, count: int) -> Record:
    """`count` events there are with these."""
    return Record(f"{response_id}/{count}", frames, FINISHED, response_id, count)


def after(chunk: Record, place: int) -> bytes:
    """Of a chunk the events behind the first `place` of the response."""
    frames = chunk.data.split(_END)[:-1]
    known = max(0, place - (chunk.order - len(frames)))
    return b"".join([frame + _END for frame in frames[known:]])


def cancelled(record: Record) -> list[Record]:
    """What is kept of an unfinished response that somebody has ended."""
    return _ended(record, CANCELLED, {"status": "cancelled"})


def lost(record: Record, events: int) -> list[Record]:
    """Of one whose maker is gone; `events` are those that were kept, 0 where it is not streamed."""
    records = _ended(record, LOST, _LOST)
    if events:
        response = decode(records[0]).response
        told = {"type": "response.failed", "sequence_number": events, "response": response}
        frame = b"event: response.failed\ndata: " + orjson.dumps(told) + _END
        records.append(chunk_record(record.id, frame, events + 1))
    return records


def _ended(record: Record, version: int, members: dict[str, Any]) -> list[Record]:
    kept = decode(record)
    response, own = orjson.dumps(kept.response | members), orjson.dumps(kept.input)
    data = encode(response, own, kept.chain, kept.before, turned=False)
    beat = beat_record(record.id, members["status"], version)
    return [record._replace(data=data, version=version), beat]


class Events:
    """A `Body` that keeps what is written in chunks; with `keep` None it keeps nothing.

    Whoever makes the response waits where too much is not kept yet. Those beyond `room` bytes of
    chunks are left out, but for what is written last: an answer is not lost for its events.
    """

    def __init__(
        self,
        response_id: str,
        keep: Callable[[Sequence[Record]], Awaitable[None]] | None,
        room: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._id = response_id
        self._keep = keep
        self._room = room
        self._clock = clock
        self._began = self._kept = clock()
        self._pending = bytearray()
        self._count = 0
        self._keeping = asyncio.Lock()
        self._news = asyncio.Event()

    def write(self, data: bytes) -> bool:
        if self._keep is None:
            return True
        self._count += data.count(_END)
        if self._room <= 0:
            self._pending[:] = data
            return True
        self._pending += data
        return len(self._pending) < _CHUNK

    async def drain(self, by: float | None = None) -> None:
        if len(self._pending) >= _CHUNK:
            async with asyncio.timeout_at(by):
                await self.flush()

    async def flush_in_time(self) -> None:
        """As `flush`, if it is time for the next chunk."""
        now = self._clock()
        if self._room > 0 and now - self._kept >= (now - self._began) * _PART:
            await self.flush()

    async def flush(
        self, keep: Callable[[Sequence[Record]], Awaitable[None]] | None = None
    ) -> None:
        """Keeps what is new, by `keep` if given, which is then called in any case.

        Raises what that raises; nothing is lost then.
        """
        async with self._keeping:
            frames = bytes(self._pending)
            records = [chunk_record(self._id, frames, self._count)] if frames else []
            put = keep or self._keep
            if put is None or not (records or keep):
                return
            self._pending.clear()
            try:
                await put(records)
            except BaseException:
                self._pending[:0] = frames
                raise
            self._kept = self._clock()
            self._room -= sum([record.size for record in records])
            self.tell()

    async def ended(self) -> bool:
        """Whether any were written; returns once none is on its way any more."""
        async with self._keeping:
            return self._count > 0

    def tell(self) -> None:
        """Wakes who waits for news."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Returns when more is kept, or in a moment in any case."""
        try:
            async with asyncio.timeout(1.0):
                await self._news.wait()
        except TimeoutError:
            pass


async def delete_events(kept: Conversations, tenant: str, response_id: str) -> None:
    """All that are kept of a response. Raises what `Conversations.delete` raises."""
    while chunks := await kept.members(tenant, response_id, after=0, limit=_DELETED_AT_ONCE):
        await kept.delete(tenant, [chunk.id for chunk in chunks])
