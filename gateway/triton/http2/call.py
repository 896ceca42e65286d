"""An RPC on an HTTP/2 connection, with a buffer of received responses that were not read yet."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gateway.triton.failures import Status, from_status
from gateway.triton.http2.frames import Code
from gateway.triton.transport import MAX_MESSAGE_BYTES, OnEnded

# Flow-control window of a stream: number of bytes that the server may send before the reader has
# read any of them. Tokens need a few KB. Logits need a megabyte or more.
WINDOW = 2**20
_LOW_WINDOW_BYTES = WINDOW // 2

# gRPC's prefix of each message: one byte, which is 1 if the message is compressed, and the
# message's length in bytes.
PREFIX = struct.Struct(">BI")
_PREFIX_BYTES = PREFIX.size

T = TypeVar("T")


class StreamControl(Protocol):
    """Methods of a connection that its calls use."""

    arrived: list[RpcCall[Any]]
    """Calls with new messages. The messages are delivered when all received bytes are processed."""

    def reset(self, stream_id: int, code: Code) -> None:
        """Send RST_STREAM for the stream. No further messages of the stream are delivered."""

    def abandon(self, stream_id: int, ended: OnEnded | None) -> None:
        """Ignore further messages of the stream, and wait for the server to end the stream.

        If the server does not end the stream within `ABANDON_GRACE_S` seconds, reset the stream.
        Call `ended` in both cases; see `OnEnded`.
        """

    async def wait_sent(self, stream_id: int) -> None:
        """Wait until the stream's request is written or aborted."""

    def begin_wait(self) -> None:
        """Turn off the delay of reads until `end_wait`. Call this before waiting for a message."""

    def end_wait(self) -> None:
        """Undo one call of `begin_wait`."""

    def credit(self, stream_id: int, increment: int) -> None:
        """Allow the server to send `increment` more bytes on the stream."""


class RpcCall(Generic[T]):
    """An RPC over HTTP/2, with the methods of `ResponseStream` to read its responses.

    `feed` passes messages to a callback without a task switch. `read` needs up to one task switch
    for each message.
    """

    __slots__ = (
        "_arrived",
        "_cancelled",
        "_chunks",
        "_control",
        "_discarded",
        "_held_bytes",
        "_loop",
        "_messages",
        "_needed",
        "_parse",
        "_take",
        "_waiter",
        "_window",
        "status",
        "stream_id",
        "text",
    )

    def __init__(self, control: StreamControl, parse: Callable[[bytes], T]) -> None:
        self.stream_id = 0
        self.status: int | None = None
        """gRPC status code of the ended RPC; None while the RPC runs."""
        self.text = ""
        self._control = control
        self._arrived = control.arrived
        self._loop = asyncio.get_running_loop()
        self._parse = parse
        self._messages: list[bytes] = []
        self._discarded = 0
        # Future for which the task in `read` or `feed` waits. For `feed`, `_take` is the callback
        # that gets the messages. When the callback returns False, the future gets the result True,
        # and `feed` returns.
        self._waiter: asyncio.Future[bool] | None = None
        self._take: Callable[[Sequence[bytes]], bool] | None = None
        self._cancelled = False
        self._window = WINDOW
        # Received payloads of an incomplete message. They are joined and split into messages when
        # they have `_needed` bytes together.
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._needed = _PREFIX_BYTES

    async def wait_sent(self) -> None:
        await self._control.wait_sent(self.stream_id)

    async def read(self) -> T | None:
        while not self._messages:
            if self._has_ended():
                return None
            self._control.begin_wait()
            try:
                await self._wait(None)
            finally:
                self._control.end_wait()
                self._waiter = self._take = None
        message = self._messages.pop(0)
        if not self._messages:
            self._refill()
        return self._parse(message)

    async def feed(self, take: Callable[[Sequence[bytes]], bool]) -> bool:
        while True:
            if self._messages and not take(self._take_all()):
                return True  # the window is refilled at the next call
            if self._has_ended():
                return False
            # Await the future here and not in an inner coroutine, whose object would take memory
            # for each waiting stream.
            try:
                if await self._wait(take):
                    return True
            finally:
                self._waiter = self._take = None

    @property
    def is_awaited(self) -> bool:
        """True if a task waits in `read`. The next message wakes the task."""
        return self._waiter is not None and self._take is None

    @property
    def window(self) -> int:
        """Number of bytes that the server may send on this stream before the next window update."""
        return self._window

    @property
    def unread(self) -> int:
        return self._discarded + len(self._messages)

    def cancel(self) -> None:
        if self._give_up():
            self._control.reset(self.stream_id, Code.CANCEL)

    def abandon(self, ended: OnEnded | None = None) -> None:
        if self._give_up():
            self._control.abandon(self.stream_id, ended)
        elif ended is not None and not self._cancelled:
            ended(self.status == Status.OK)

    def _give_up(self) -> bool:
        """Mark the call as cancelled. A waiting read then raises CancelledError.

        Return False if the RPC has already ended.
        """
        if self.status is not None:
            return False
        self._cancelled = True
        self.end(Status.CANCELLED, "cancelled here")
        self._discarded = len(self._messages)
        self._messages.clear()
        return True

    def _has_ended(self) -> bool:
        """Return True if the RPC has ended successfully, and False if it is running.

        Raise CancelledError after a cancellation, and GatewayError if the RPC has failed.
        """
        if self._cancelled:
            raise asyncio.CancelledError
        if self.status is None or self.status == Status.OK:
            return self.status is not None
        raise from_status(self.status, self.text)

    def _wait(self, take: Callable[[Sequence[bytes]], bool] | None) -> asyncio.Future[bool]:
        """Return a future for the next messages. Afterwards, clear `_waiter` and `_take`."""
        assert self._waiter is None, "one reader at a time"
        self._refill()
        self._waiter, self._take = self._loop.create_future(), take
        return self._waiter

    def _take_all(self) -> Sequence[bytes]:
        messages, self._messages = self._messages, []
        return messages

    def deliver(self) -> None:
        """Hand the unread messages to the waiting reader.

        Called after all bytes that arrived together with the messages have been processed. Do
        nothing if a reader has taken the messages in the meantime.
        """
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._messages:
            return
        enough = False
        if self._take is not None:
            messages, self._messages = self._messages, []
            try:
                enough = not self._take(messages)
            except BaseException as error:  # a panic in Rust code is no subclass of Exception
                waiter.set_exception(error)
                return
            if not enough:
                if self._window < _LOW_WINDOW_BYTES:
                    self._refill()
                return
        waiter.set_result(enough)

    def receive(
        self, data: bytes, start: int, stop: int, is_complete: bool = False, padding: int = 0
    ) -> None:
        """Process the payload ``data[start:stop]`` of one DATA frame. Called once per token.

        `is_complete` is True if the payload's length is that of one complete message with its
        prefix. If earlier payloads have left an incomplete message, `is_complete` has no effect.
        `padding` is the number of padding bytes in the frame. Like the payload, they use up the
        flow-control window.
        """
        self._window -= stop - start + padding
        if self._window < 0:
            self._refuse(Code.FLOW_CONTROL_ERROR, "more data than was allowed")
        elif is_complete and not self._held_bytes:
            if not self._messages:
                self._arrived.append(self)
            self._messages.append(data[start + _PREFIX_BYTES : stop])
        else:
            self._assemble(data[start:stop])

    def end(self, status: int, text: str) -> None:
        """End the RPC. Messages that were received before can still be read."""
        if self.status is not None:
            return
        if status == Status.OK and self._held_bytes:
            status, text = Status.INTERNAL, "the stream ended within a message"
        self.status, self.text = status, text
        self._chunks.clear()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(False)

    def _add(self, message: bytes) -> None:
        if not self._messages:
            self._arrived.append(self)
        self._messages.append(message)

    def _assemble(self, payload: bytes) -> None:
        """Process a payload that has a part of a message, or several messages."""
        self._chunks.append(payload)
        self._held_bytes += len(payload)
        if self._held_bytes >= self._needed and not self._split():
            return
        if not self._messages and self._needed - self._held_bytes > self._window:
            # Let the server send more bytes now. The rest of the message is longer than the rest of
            # the window. Normally, the window is refilled when a message has been read. But this
            # message could never be received completely, and so it could never be read.
            self._refill()

    def _split(self) -> bool:
        """Move complete messages from `_chunks` to `_messages`.

        Return False if the call was ended because of an invalid message.
        """
        data = b"".join(self._chunks)
        start = 0
        while True:
            self._needed = _PREFIX_BYTES
            if len(data) - start < _PREFIX_BYTES:
                break
            compressed, length = PREFIX.unpack_from(data, start)
            if compressed:
                self._refuse(Code.CANCEL, "a compressed message, which was not offered")
                return False
            if length > MAX_MESSAGE_BYTES:
                self._refuse(Code.CANCEL, f"a message of {length} bytes")
                return False
            self._needed += length
            if len(data) - start < self._needed:
                break
            self._add(data[start + _PREFIX_BYTES : start + self._needed])
            start += self._needed
        self._chunks = [data[start:]]
        self._held_bytes = len(data) - start
        return True

    def _refuse(self, code: Code, text: str) -> None:
        self.end(Status.INTERNAL, text)
        self._control.reset(self.stream_id, code)

    def _refill(self) -> None:
        """Let the server send more bytes, if less than half of the flow-control window is left."""
        if self._window < _LOW_WINDOW_BYTES and self.status is None:
            self._control.credit(self.stream_id, WINDOW - self._window)
            self._window = WINDOW


class PieceCall(RpcCall[bytes]):
    """A call that returns the received bytes in chunks of any size, including gRPC's prefixes."""

    __slots__ = ()

    def receive(
        self, data: bytes, start: int, stop: int, is_complete: bool = False, padding: int = 0
    ) -> None:
        self._window -= stop - start + padding
        if self._window < 0:
            self._refuse(Code.FLOW_CONTROL_ERROR, "more data than was allowed")
        elif stop > start:
            self._add(data[start:stop])
