"""Encoder and decoder of the HTTP/2 frames (RFC 9113) that a gRPC call needs.

The benchmark's scripted servers (`bench.grpc_server`) and its client (`bench.direct`) share this
module. The peer is trusted, so frames are not validated. The module needs no HPACK encoder
(RFC 7541): header fields are sent as literals without indexing and without Huffman coding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20

INITIAL_WINDOW_SIZE = 4
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
CANCEL = struct.pack(">I", 8)

# SETTINGS payload with the largest flow-control window, so that a sender never has to wait.
OPEN_SETTINGS = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def grpc_message(payload: bytes) -> bytes:
    """Return an uncompressed gRPC message: `payload` with gRPC's five-byte prefix."""
    return struct.pack(">BI", 0, len(payload)) + payload


def data(stream: int, message: bytes) -> bytes:
    """Return a gRPC message of less than 16 KiB as one DATA frame."""
    return frame(DATA, 0, stream, grpc_message(message))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def opening() -> bytes:
    """Return the first frames that a client or a server sends on a connection.

    They set the flow-control windows to the maximum. A client must send `PREFACE` before them.
    """
    return frame(SETTINGS, 0, 0, OPEN_SETTINGS) + window_update(0, LARGEST_WINDOW - DEFAULT_WINDOW)


def literal(name: str, value: str) -> bytes:
    """Return an encoded header field that is not added to the dynamic table."""
    raw_name, raw_value = name.encode(), value.encode()
    if len(raw_name) > 126 or len(raw_value) > 126:
        raise ValueError(f"{name}: longer than 126 bytes")
    return bytes([0, len(raw_name)]) + raw_name + bytes([len(raw_value)]) + raw_value


def take_frames(buffer: bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (type, flags, stream id, payload) of each complete frame in `buffer`.

    The yielded frames are removed from `buffer` when the iteration ends.
    """
    at, end = 0, len(buffer)
    view = bytes(buffer)
    while end - at >= 9:
        head, flags, stream = struct.unpack_from(">IBI", view, at)
        after = at + 9 + (head >> 8)
        if after > end:
            break
        yield head & 0xFF, flags, stream & LARGEST_WINDOW, view[at + 9 : after]
        at = after
    del buffer[:at]


def bare_payload(flags: int, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without padding and priority."""
    end = len(payload)
    if flags & PADDED:
        end -= payload[0]
        payload, end = payload[1:end], end - 1
    return payload[5:] if flags & PRIORITY else payload


def take_messages(buffer: bytearray) -> Iterator[bytes]:
    """Remove each complete gRPC message from `buffer`, and yield its payload.

    Raises ValueError for a compressed message.
    """
    while len(buffer) >= 5:
        compressed, size = struct.unpack_from(">BI", buffer)
        if compressed:
            raise ValueError("compressed message")
        if len(buffer) < 5 + size:
            return
        message = bytes(buffer[5 : 5 + size])
        del buffer[: 5 + size]
        yield message
