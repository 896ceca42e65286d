"""HTTP/2 connection to Triton: opens and ends calls, and passes received frames to them.

`_consume` and `RpcCall.receive` do all the work for a token, so that a token takes little CPU time.
`python -m bench.transport` has measured these times per token:

- 100 streams with a token every 20 ms each, on one core: 17 us (with grpc.aio: 36 to 40 us).
- Streams at full speed, on 2 cores: 3 us (with grpc.aio: 24 us).

All other code runs at most once per request, and is written to be readable.

The base class `BaseConnection` reads and writes the bytes.

See decision 054 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpack.exceptions import HPACKError

from gateway.triton.failures import Status
from gateway.triton.http2 import frames, headers
from gateway.triton.http2.base_connection import BaseConnection
from gateway.triton.http2.call import PREFIX, WINDOW, RpcCall
from gateway.triton.http2.frames import Code, ConnectionFault
from gateway.triton.transport import ABANDON_GRACE_S, MAX_ABANDONED, Message, OnEnded

log = logging.getLogger(__name__)

# Flow-control window of the connection: number of bytes that the server may send on all streams
# together before it gets a window update. The update is sent when bytes arrive, before any task has
# read them. Unread bytes are limited by the windows of the streams instead.
_CONNECTION_WINDOW = 2**25
_LOW_WINDOW_BYTES = _CONNECTION_WINDOW // 2
# Total number of bytes by which the flow-control window of an abandoned stream may be extended. The
# server may need them to send its last tokens or some logits before it ends the stream.
ABANDONED_ALLOWANCE_BYTES = 2**24
_MAX_HEADER_BYTES = 2**16
# Minimum number of streams with responses at which reads are delayed to receive several tokens at
# once (see `_gather`).
_MIN_STREAMS_TO_GATHER = 32
_OF_RST: dict[int, Status] = {
    Code.REFUSED_STREAM: Status.UNAVAILABLE,
    Code.CANCEL: Status.CANCELLED,
    Code.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    Code.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}
_HEAD = frames.HEAD
_HEAD_BYTES = frames.HEAD_BYTES
_LONGEST_FRAME = frames.DEFAULT_MAX_FRAME
_PREFIX_BYTES = PREFIX.size
# Header of a frame, followed by the prefix of a gRPC message. Most DATA frames start with both, so
# both are unpacked in one step to save time.
_BEGINNING = struct.Struct(_HEAD.format + PREFIX.format.removeprefix(">"))
_BEGINNING_BYTES = _BEGINNING.size


@dataclass(slots=True)
class _AbandonedStream:
    """A stream whose responses are no longer read, and which the server has not ended yet.

    Attributes:
        timer: timer that resets the stream.
        window: number of bytes that the server may send now.
        ended: called when the stream has ended or was reset; see `OnEnded`.
        allowance: number of bytes by which the window may still be extended.
    """

    timer: asyncio.TimerHandle
    window: int
    ended: OnEnded | None
    allowance: int = ABANDONED_ALLOWANCE_BYTES


class Http2Connection(BaseConnection):
    """A connection on which calls can be opened.

    `on_change` is called with this connection in three cases: `closed` has become True, `gone` was
    set, or a call has ended.
    """

    def __init__(self, on_change: Callable[[Http2Connection], None]) -> None:
        super().__init__(on_change)
        self._decoder = headers.BlockDecoder(_MAX_HEADER_BYTES)
        self._calls: dict[int, RpcCall[Any]] = {}
        # Calls whose response headers have arrived. Only these may get DATA frames.
        self._receiving: dict[int, RpcCall[Any]] = {}
        self._abandoned: dict[int, _AbandonedStream] = {}
        self.arrived: list[RpcCall[Any]] = []
        self._next_id = 1
        self._max_calls = frames.STREAM_ID
        self._window = _CONNECTION_WINDOW
        # An incomplete header block: stream id, flags of its first frame, bytes received so far.
        self._block: tuple[int, int, bytearray] | None = None
        self._draining = False
        self.greeted = False
        """True if the server has sent its SETTINGS, which is the first frame in HTTP/2."""
        self.settled = asyncio.Event()
        """Set when the server's SETTINGS have arrived, or when the connection is lost."""

    @property
    def can_open(self) -> bool:
        """True if one more call can be opened."""
        return (
            len(self._calls) + len(self._abandoned) < self._max_calls
            and not self._draining
            and not self.closed
            and self._next_id <= frames.STREAM_ID
        )

    @property
    def idle(self) -> bool:
        return not self._calls and not self._abandoned

    # Opening and ending calls.

    def open(self, call: RpcCall[Any], block: bytes, message: Message, size: int) -> None:
        """Send a request on a new stream. Call this only if `can_open` is True.

        Args:
            call: gets the responses.
            block: the header block.
            message: the request's bytes in chunks.
            size: number of bytes in `message`; greater than 0.
        """
        assert self.can_open
        stream_id = call.stream_id = self._next_id
        self._next_id += 2
        self._calls[stream_id] = call
        head = frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, block)
        if self._uploads.fits(size):
            # Send this request at once, before queued uploads. It fits into one frame, so the
            # uploads are delayed only a little.
            self._uploads.window -= size
            data = _HEAD.pack(size << 8 | frames.DATA, frames.END_STREAM, stream_id)
            self._transport.write(b"".join((head, data, *message)))
        else:
            self._transport.write(head)
            self._uploads.add(stream_id, message)
            # End a delay of the next read, because the upload needs the server's window updates.
            self._stop_gathering()
            self._pump()

    def reset(self, stream_id: int, code: Code) -> None:
        if self._calls.pop(stream_id, None) is None:
            return
        self._receiving.pop(stream_id, None)
        self._uploads.drop(stream_id)
        self._transport.write(frames.rst_stream(stream_id, code))
        self._call_ended()

    def abandon(self, stream_id: int, ended: OnEnded | None) -> None:
        if len(self._abandoned) >= MAX_ABANDONED or self._uploads.drop(stream_id):
            self.reset(stream_id, Code.CANCEL)
            if ended is not None:
                ended(False)
        elif (call := self._calls.pop(stream_id, None)) is not None:
            self._receiving.pop(stream_id, None)
            timer = self._loop.call_later(ABANDON_GRACE_S, self._reset_abandoned, stream_id)
            left = self._abandoned[stream_id] = _AbandonedStream(timer, call.window, ended)
            self._credit_abandoned(stream_id, left, 0)

    def _credit_abandoned(self, stream_id: int, left: _AbandonedStream, size: int) -> None:
        """Subtract `size` received bytes from an abandoned stream's window.

        If less than half of the window is left, extend the window within the stream's allowance. If
        the window were used up, the server could neither send its last bytes nor end the stream.
        """
        left.window -= size
        increment = min(WINDOW - left.window, left.allowance)
        if left.window < WINDOW // 2 and increment > 0:
            left.window += increment
            left.allowance -= increment
            self.credit(stream_id, increment)

    def _reset_abandoned(self, stream_id: int) -> None:
        self._transport.write(frames.rst_stream(stream_id, Code.CANCEL))
        self._end_abandoned(stream_id, by_server=False)

    def _end_abandoned(self, stream_id: int, *, by_server: bool = True) -> None:
        left = self._abandoned.pop(stream_id, None)
        if left is not None:
            left.timer.cancel()
            if left.ended is not None:
                left.ended(by_server)
            self._call_ended()

    async def wait_sent(self, stream_id: int) -> None:
        await self._uploads.wait_ended(stream_id)

    def credit(self, stream_id: int, increment: int) -> None:
        if not self.closed:
            self._transport.write(frames.window_update(stream_id, increment))

    def _end(self, call: RpcCall[Any], status: int, text: str) -> None:
        """End a call whose stream the server has ended."""
        del self._calls[call.stream_id]
        self._receiving.pop(call.stream_id, None)
        if self._uploads.drop(call.stream_id):
            # Reset the stream, because the server has ended it before the upload was complete.
            self._transport.write(frames.rst_stream(call.stream_id, Code.CANCEL))
        call.end(status, text)
        self._call_ended()

    def _call_ended(self) -> None:
        if self._draining and self.idle:
            self.close("the server has asked for a new connection")
        else:
            self._on_change(self)

    def _end_calls(self, why: str) -> None:
        self._receiving.clear()
        for left in self._abandoned.values():
            left.timer.cancel()
            if left.ended is not None:
                left.ended(False)
        self._abandoned.clear()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(Status.UNAVAILABLE, why)
        self.settled.set()

    # Processing received bytes.

    def _greeting(self) -> bytes:
        settings = [
            (frames.ENABLE_PUSH, 0),
            (frames.INITIAL_WINDOW_SIZE, WINDOW),
            (frames.MAX_HEADER_LIST_SIZE, _MAX_HEADER_BYTES),
        ]
        window = frames.window_update(0, _CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        return frames.PREFACE + frames.settings(settings) + window

    def _consume(self, data: bytes) -> int:
        """Process the complete frames in `data`. Return the index of the first unprocessed byte."""
        receiving = self._receiving
        start, end = 0, len(data)
        received = 0
        while (left := end - start) >= _HEAD_BYTES:
            if left >= _BEGINNING_BYTES:
                word, flags, stream_id, compressed, length = _BEGINNING.unpack_from(data, start)
            else:
                word, flags, stream_id = _HEAD.unpack_from(data, start)
                compressed, length = 1, 0
            size = word >> 8
            if size > _LONGEST_FRAME:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            body = start + _HEAD_BYTES
            stop = body + size
            if stop > end:
                break
            # Fast path for a plain DATA frame (type 0, no flags) of a running call.
            if not (word & 0xFF or flags) and stream_id in receiving and self._block is None:
                received += size
                whole = length == size - _PREFIX_BYTES and not compressed
                receiving[stream_id].receive(data, body, stop, whole)
            else:
                stream_id &= frames.STREAM_ID
                self._frame(word & 0xFF, flags, stream_id, data[body:stop])
                if self.closed:  # all calls have ended, so ignore the remaining frames
                    return end
            start = stop
        self._window -= received
        if self._window < _LOW_WINDOW_BYTES:
            self._renew_window()
        if arrived := self.arrived:
            self._deliveries.add(arrived, self._paused_since)
            arrived.clear()
        if len(receiving) >= _MIN_STREAMS_TO_GATHER:
            self._gather(end)
        return start

    def _renew_window(self) -> None:
        """Allow the server to send `_CONNECTION_WINDOW` more bytes of DATA on all streams together.

        Raise ConnectionFault if the server has sent more than the last window allowed.
        """
        if self._window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more data than was allowed")
        self._transport.write(frames.window_update(0, _CONNECTION_WINDOW - self._window))
        self._window = _CONNECTION_WINDOW

    # Processing frames other than the plain DATA of a running call.

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self.settled.is_set() and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "no SETTINGS at the beginning")
        if (self._block is None) == (kind == frames.CONTINUATION):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block is interrupted")
        if kind == frames.DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == frames.HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind == frames.RST_STREAM:
            self._on_rst_stream(stream_id, frames.read_u32(payload))
        elif kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, frames.read_u32(payload) & frames.MAX_WINDOW)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == frames.PING:
            self._on_ping(flags, stream_id, payload)
        elif kind == frames.GOAWAY:
            self._on_goaway(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE although it is off")
        # Ignore PRIORITY, which clients do not need, and unknown types, as the RFC requires.

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._window -= len(payload)
        if self._window < _LOW_WINDOW_BYTES:
            self._renew_window()
        call = self._call(stream_id)
        if call is None:
            if flags & frames.END_STREAM:
                self._end_abandoned(stream_id)
            elif (left := self._abandoned.get(stream_id)) is not None:
                self._credit_abandoned(stream_id, left, len(payload))
            return
        if stream_id not in self._receiving:
            self._break(call, "DATA before the headers")
            return
        data = frames.strip_padding(flags, payload)
        call.receive(data, 0, len(data), padding=len(payload) - len(data))
        if flags & frames.END_STREAM and stream_id in self._calls:
            self._end(call, Status.UNKNOWN, "the stream ended without a status")

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = frames.strip_padding(flags, payload)
        if flags & frames.PRIORITY_FLAG:
            if len(block) < 5:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "HEADERS of a broken length")
            block = block[5:]
        self._block = (stream_id, flags, bytearray(block))
        if flags & frames.END_HEADERS:
            self._on_block()

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        assert self._block is not None
        if stream_id != self._block[0]:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of another stream")
        self._block[2].extend(payload)
        # Refuse empty frames, too, because a server could send any number of them.
        if len(self._block[2]) > _MAX_HEADER_BYTES or not payload:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "an endless header block")
        if flags & frames.END_HEADERS:
            self._on_block()

    def _on_block(self) -> None:
        """Process a complete header block.

        The block is decoded even if the call of its stream has ended. Each block can change the
        decoder's dynamic table, which is needed to decode later blocks.
        """
        assert self._block is not None
        stream_id, flags, block = self._block
        self._block = None
        try:
            status = self._decoder.decode(bytes(block))
        except (HPACKError, IndexError, ValueError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"header block: {error}") from error
        call = self._call(stream_id)
        ended = bool(flags & frames.END_STREAM)
        if call is None:
            if ended:
                self._end_abandoned(stream_id)
            return
        if stream_id in self._receiving:
            if ended:
                self._end(call, *status.outcome)
            else:
                self._break(call, "HEADERS in the middle of a stream")
        elif ended and status.ends:
            self._end(call, *status.outcome)
        elif status.informational and not ended:
            pass
        elif status.refusal is not None:
            call.end(*status.refusal)
            self.reset(stream_id, Code.CANCEL)
        elif ended:
            self._end(call, Status.UNKNOWN, "the stream ended without a status")
        else:
            self._receiving[stream_id] = call

    def _on_rst_stream(self, stream_id: int, code: int) -> None:
        call = self._call(stream_id)
        self._end_abandoned(stream_id)
        if call is not None:
            self._uploads.drop(stream_id)
            status = _OF_RST.get(code, Status.INTERNAL)
            self._end(call, status, f"RST_STREAM with code {code}")

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            if not increment:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a window update of 0")
            self._uploads.widen_connection(increment)
        elif (call := self._call(stream_id)) is not None:
            if not increment:
                self._break(call, "a window update of 0")
            elif not self._uploads.widen(stream_id, increment):
                self._break(call, "the stream's window overflows", Code.FLOW_CONTROL_ERROR)
        self._pump()

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or (flags & frames.ACK and payload):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "unexpected SETTINGS")
        if flags & frames.ACK:
            return
        for key, value in frames.read_settings(payload):
            if key == frames.MAX_CONCURRENT_STREAMS:
                self._max_calls = value
            elif key == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"windows of {value} bytes")
                self._uploads.set_initial(value)
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.DEFAULT_MAX_FRAME <= value < 2**24:
                    raise ConnectionFault(Code.PROTOCOL_ERROR, f"frames of {value} bytes")
                self._uploads.max_frame = value
        self._answer(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.greeted = True
        self.settled.set()
        self._pump()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING of a broken length")
        if not flags & frames.ACK:
            self._answer(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_goaway(self, stream_id: int, payload: bytes) -> None:
        """Process GOAWAY: fail the calls that the server will not process.

        The other calls may finish. New calls use other connections.
        """
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "GOAWAY on a stream")
        last, code, debug = frames.read_goaway(payload)
        if code != Code.NO_ERROR:
            log.warning("the server ends the connection: code %d, %r", code, debug[:200])
        self._draining = True
        for unseen in [call for call in self._calls.values() if call.stream_id > last]:
            self._uploads.drop(unseen.stream_id)
            self._end(unseen, Status.UNAVAILABLE, "the server is going away")
        if not self.closed and self.idle:
            self.close("the server has asked for a new connection")

    def _call(self, stream_id: int) -> RpcCall[Any] | None:
        """Return the call of a stream. Return None if the call has ended.

        Raise ConnectionFault if the stream never existed.
        """
        if not stream_id % 2 or stream_id >= self._next_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame of stream {stream_id}")
        return self._calls.get(stream_id)

    def _break(self, call: RpcCall[Any], text: str, code: Code = Code.PROTOCOL_ERROR) -> None:
        """Fail one call, because the server violated the protocol on its stream."""
        call.end(Status.INTERNAL, text)
        self.reset(call.stream_id, code)
