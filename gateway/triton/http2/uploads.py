"""Sending of requests that do not fit into one frame or into the server's flow-control window.

Uploads of LoRA adapters, which may have 500 MB, share the connection with all other requests. So
concurrent uploads take turns, one chunk at a time. Each chunk must fit into two flow-control
windows: the window of its stream, and the window of the connection (RFC 9113, 5.2).

See decision 059 in docs/decisions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from gateway.triton.http2.frames import (
    DATA,
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    END_STREAM,
    HEAD,
    MAX_WINDOW,
    Code,
    ConnectionFault,
)

# Maximum payload of one frame in bytes. A server may allow 16 MiB, but such frames would delay
# other uploads.
_MAX_CHUNK_BYTES = 2**16


class _Upload:
    __slots__ = ("bytes_left", "ended", "pieces", "stream_id", "window")

    def __init__(self, stream_id: int, message: Iterable[bytes | memoryview], window: int) -> None:
        self.stream_id = stream_id
        # Cast to bytes, because a memoryview may have larger items.
        self.pieces = deque(memoryview(piece).cast("B") for piece in message if len(piece))
        self.bytes_left = sum(len(piece) for piece in self.pieces)
        self.window = window
        self.ended = asyncio.Event()

    def take(self, size: int) -> list[memoryview]:
        """Return views of the next `size` bytes, and remove these bytes from the upload."""
        pieces = []
        self.bytes_left -= size
        while size:
            piece = self.pieces[0]
            if len(piece) <= size:
                self.pieces.popleft()
            else:
                self.pieces[0] = piece[size:]
                piece = piece[:size]
            pieces.append(piece)
            size -= len(piece)
        return pieces


class Uploads:
    """Unfinished uploads of one connection, with the flow-control windows that limit them.

    `window` is the number of bytes that may now be sent on the connection.
    """

    def __init__(self) -> None:
        self.window = DEFAULT_WINDOW
        self.max_frame = DEFAULT_MAX_FRAME
        self._initial = DEFAULT_WINDOW
        self._open: dict[int, _Upload] = {}
        # Uploads whose stream's flow-control window is not used up, in round-robin order.
        self._ready: deque[_Upload] = deque()

    def fits(self, size: int) -> bool:
        """Return True if a new request of `size` bytes can be sent at once as one frame."""
        return size <= self.window and size <= self._initial and size <= self.max_frame

    @property
    def open(self) -> bool:
        """True if there is an unfinished upload."""
        return bool(self._open)

    def has_ready(self) -> bool:
        """Return True if `frames` would return a frame."""
        return bool(self._ready) and self.window > 0

    def add(self, stream_id: int, message: Iterable[bytes | memoryview]) -> None:
        """Add an upload. `message` must not be empty, because its last frame ends the stream."""
        upload = self._open[stream_id] = _Upload(stream_id, message, self._initial)
        if upload.window > 0:
            self._ready.append(upload)

    def drop(self, stream_id: int) -> bool:
        """Drop the unfinished upload of a stream. Return False if there is none."""
        upload = self._open.pop(stream_id, None)
        if upload is None:
            return False
        upload.ended.set()
        if upload in self._ready:
            self._ready.remove(upload)
        return True

    def clear(self) -> None:
        for stream_id in list(self._open):
            self.drop(stream_id)

    async def wait_ended(self, stream_id: int) -> None:
        """Wait until `frames` has returned the upload's last frame, or the upload was dropped."""
        upload = self._open.get(stream_id)
        if upload is not None:
            await upload.ended.wait()

    def widen(self, stream_id: int, increment: int) -> bool:
        """Process a WINDOW_UPDATE for one stream. Return False if the stream's window overflows."""
        upload = self._open.get(stream_id)
        return upload is None or self._widen(upload, increment)

    def widen_connection(self, increment: int) -> None:
        """Process a WINDOW_UPDATE for the connection.

        Raise ConnectionFault if the connection's window overflows."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "the connection's window overflows")

    def set_initial(self, window: int) -> None:
        """Set the server's INITIAL_WINDOW_SIZE in bytes.

        The windows of unfinished uploads grow by the difference between the new and the old value,
        or shrink if it is negative. Raise ConnectionFault if a window overflows.
        """
        difference = window - self._initial
        self._initial = window
        if not all(self._widen(upload, difference) for upload in self._open.values()):
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a stream's window overflows")

    def frames(self, limit: int) -> list[bytes | memoryview]:
        """Return DATA frames with about `limit` bytes of the uploads, in the order of writing."""
        out: list[bytes | memoryview] = []
        while limit > 0 and self.has_ready():
            upload = self._ready.popleft()
            if upload.window <= 0:  # the server has reduced INITIAL_WINDOW_SIZE
                continue
            size = min(
                upload.bytes_left, upload.window, self.window, self.max_frame, _MAX_CHUNK_BYTES
            )
            flags = END_STREAM if size == upload.bytes_left else 0
            out.append(HEAD.pack(size << 8 | DATA, flags, upload.stream_id))
            out += upload.take(size)
            upload.window -= size
            self.window -= size
            limit -= size
            if not upload.bytes_left:
                self.drop(upload.stream_id)
            elif upload.window > 0:
                self._ready.append(upload)
        return out

    def _widen(self, upload: _Upload, increment: int) -> bool:
        upload.window += increment
        if upload.window > 0 and upload not in self._ready:
            self._ready.append(upload)
        return upload.window <= MAX_WINDOW
