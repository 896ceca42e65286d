"""Encoding and decoding of HTTP/2 frames (RFC 9113, sections 4, 6 and 7)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Header of a frame: the payload's length (24 bits) and the frame type (8 bits) as one number, the
# flags (8 bits), and the stream id with its reserved bit (32 bits).
HEAD = struct.Struct(">IBI")
HEAD_BYTES = HEAD.size
_SETTING = struct.Struct(">HI")
_U32 = struct.Struct(">I")
_GOAWAY = struct.Struct(">II")

# Frame types. They are plain numbers, which are faster to compare than enum members.
DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

ENABLE_PUSH = 2
MAX_CONCURRENT_STREAMS = 3
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
MAX_HEADER_LIST_SIZE = 6

STREAM_ID = 0x7FFF_FFFF
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 2**16 - 1
# Default maximum payload of a frame in bytes. The client refuses longer frames, because it does not
# announce another limit.
DEFAULT_MAX_FRAME = 2**14


class Code(IntEnum):
    """Error codes of RST_STREAM and GOAWAY. The server may send other codes."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12


class ConnectionFault(Exception):
    """Protocol violation by the server. The connection must be closed."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*value) for value in values))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _U32.pack(increment))


def rst_stream(stream_id: int, code: Code) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(code: Code) -> bytes:
    """Return a GOAWAY frame. Its last stream id is 0, because the server cannot open streams."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(0, code))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Return the (identifier, value) pairs of a SETTINGS frame.

    Raise ConnectionFault if the payload has an invalid length.
    """
    if len(payload) % _SETTING.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS of a broken length")
    return _SETTING.iter_unpack(payload)


def read_u32(payload: bytes) -> int:
    """Return the number in the payload of RST_STREAM or WINDOW_UPDATE.

    Raise ConnectionFault if the payload has an invalid length.
    """
    if len(payload) != 4:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"{len(payload)} bytes in place of 4")
    value: int = _U32.unpack(payload)[0]
    return value


def read_goaway(payload: bytes) -> tuple[int, int, bytes]:
    """Return (last stream id, error code, debug data) of a GOAWAY frame.

    Raise ConnectionFault if the payload is too short.
    """
    if len(payload) < _GOAWAY.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "GOAWAY of a broken length")
    last, code = _GOAWAY.unpack_from(payload)
    return last & STREAM_ID, code, payload[_GOAWAY.size :]


def strip_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without its padding.

    Raise ConnectionFault if the padding is longer than the frame.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
