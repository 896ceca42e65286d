"""Reading, writing and closing of one HTTP/2 connection."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from gateway.triton.http2 import frames
from gateway.triton.http2.deliveries import delivery_queue
from gateway.triton.http2.frames import Code, ConnectionFault
from gateway.triton.http2.uploads import Uploads

log = logging.getLogger(__name__)

# Maximum size of a small read in bytes. After a larger read, reading pauses until the received
# messages are delivered. Without the pause, uvloop could read 32 times in one iteration of the
# loop, and messages of a fast server would fill the memory before any are delivered.
_SMALL_READ_BYTES = 2**16
# The next read is delayed by `_GATHER_S` seconds if the current read is small and comes less than
# `_FREQUENT_READ_S` seconds after the previous read (see `_gather`).
_FREQUENT_READ_S = 0.003
_GATHER_S = 0.002
# Maximum bytes of uploads written in one iteration of the loop. This takes far less than 1 ms.
_WRITE_BYTES = 2**17
_WRITE_BUFFER_BYTES = 2**18
# Maximum number of unsent answers to SETTINGS and PING. A server that sends these frames but does
# not read the answers would otherwise fill the memory.
_MAX_UNSENT_ANSWERS = 1000
_CLOSE_WITHIN_S = 1.0


class BaseConnection(asyncio.Protocol):
    """Base class of `Http2Connection` that reads, writes and closes. The subclass handles frames.

    `closed` becomes True when no more calls can be opened. `gone` is set when the TCP connection
    has ended. In both cases, `on_change` is called with the connection as its argument.
    """

    def __init__(self, on_change: Callable[[Any], None]) -> None:
        self._on_change = on_change
        self._transport: Any = None
        self._loop = asyncio.get_running_loop()
        self._uploads = Uploads()
        # Received bytes of an incomplete frame.
        self._rest = b""
        self._paused = False
        self._unsent_answers = 0
        self._read_at = 0.0
        self._can_gather = False
        self._gathering: asyncio.TimerHandle | None = None
        # Time of the last read if it was large, so that reading is paused now; otherwise None. The
        # bytes of the next read may have waited in the socket since this time.
        self._paused_since: float | None = None
        # Number of tasks that wait in `RpcCall.read`, for example for the first message of a
        # stream.
        self._waits = 0
        self._deliveries = delivery_queue()
        self._pump_scheduled = False
        self.closed = False
        """True if no more calls can be opened. Bytes that were written may still be sent."""
        self.why_closed = ""
        self.gone = asyncio.Event()

    @abstractmethod
    def _greeting(self) -> bytes:
        """Return the bytes that a client sends first on a connection."""

    @abstractmethod
    def _consume(self, data: bytes) -> int:
        """Process the complete frames in `data`. Return the index of the first unprocessed byte.

        Raise ConnectionFault if the server violates the protocol.
        """

    @abstractmethod
    def _end_calls(self, why: str) -> None:
        """Fail all running calls."""

    def close(self, why: str, code: Code = Code.NO_ERROR) -> None:
        """Send GOAWAY, close, and fail all running calls."""
        if not self.closed:
            self._transport.write(frames.goaway(code))
            self._transport.close()
            # Abort if the server does not read the remaining bytes in time.
            self._loop.call_later(_CLOSE_WITHIN_S, self._transport.abort)
            self._mark_lost(why)

    def abort(self) -> None:
        """Drop a connection without GOAWAY, because it was never usable."""
        if self._transport is not None:
            self._transport.abort()

    def _mark_lost(self, why: str) -> None:
        self.closed = True
        self.why_closed = why
        self._uploads.clear()
        self._end_calls(why)
        self._on_change(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        # Do not delay reads with TLS. uvloop would read during the delay nevertheless, and would
        # drop the data if the connection ends.
        self._can_gather = transport.get_extra_info("ssl_object") is None
        self._transport.write(self._greeting())

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        if self.closed:
            self._on_change(self)
        else:
            self._mark_lost(f"connection lost: {exc or 'closed by the server'}")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._unsent_answers = 0
        self._pump()

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        large = len(data) > _SMALL_READ_BYTES
        if large:
            self._transport.pause_reading()
        if self._rest:
            data = self._rest + data
        try:
            self._rest = data[self._consume(data) :]
            if large:
                self._paused_since = self._deliveries.now()
                self._deliveries.call_after(self._resume_reading)
            elif self._paused_since is not None:
                self._paused_since = None
        except ConnectionFault as fault:
            log.warning("the server broke the HTTP/2 protocol: %s", fault)
            self.close(str(fault), fault.code)
        except Exception:  # close the connection after a bug: its calls would wait for ever
            log.exception("an HTTP/2 connection failed")
            self.close("internal error", Code.INTERNAL_ERROR)

    def _gather(self, size: int) -> None:
        """Delay the next read, so that it returns the tokens of several streams.

        Call this after a read of `size` bytes while many streams run. Without the delay, the
        process would poll, read and sleep once for each token. These three steps take a third of
        the CPU time for a token.

        The next read is delayed only if the current read was small and came soon after the previous
        read. It is not delayed while a task waits for a message, for example for the first message
        of a stream. It is not delayed during uploads either, because uploads need the server's
        window updates.
        """
        now = self._loop.time()
        often = now - self._read_at < _FREQUENT_READ_S
        self._read_at = now
        if self._waits or self._uploads.open or not often or size > _SMALL_READ_BYTES:
            return
        if self._can_gather and not self.closed:
            self._transport.pause_reading()
            self._gathering = self._loop.call_later(_GATHER_S, self._resume_reading)

    def begin_wait(self) -> None:
        """Count one more task that waits for a message, and end a delay of the next read."""
        self._waits += 1
        self._deliveries.waits += 1
        self._stop_gathering()

    def end_wait(self) -> None:
        self._waits -= 1
        self._deliveries.waits -= 1

    def _stop_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._resume_reading()

    def _resume_reading(self) -> None:
        self._gathering = None
        if not self.closed:
            self._transport.resume_reading()

    def _pump(self) -> None:
        """Write up to `_WRITE_BYTES` bytes of the uploads.

        If more bytes can be written, do the same again in the next iteration of the loop.
        """
        if self._paused or self._pump_scheduled or self.closed or not self._uploads.has_ready():
            return
        self._transport.writelines(self._uploads.frames(_WRITE_BYTES))
        if not self._paused and self._uploads.has_ready():
            self._pump_scheduled = True
            self._loop.call_soon(self._pump_again)

    def _pump_again(self) -> None:
        self._pump_scheduled = False
        self._pump()

    def _answer(self, frame: bytes) -> None:
        self._unsent_answers += self._paused
        if self._unsent_answers > _MAX_UNSENT_ANSWERS:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "answers pile up")
        self._transport.write(frame)
