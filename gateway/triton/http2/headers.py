"""HTTP/2 header blocks: encoding for requests, and decoding of the server's blocks.

Requests do not use the dynamic table of HPACK: every field is a literal that is never indexed. One
encoded block can therefore be sent on any stream of any connection. A request is about 100 bytes
longer than with the dynamic table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from hpack import Decoder

from gateway.triton.failures import Status
from gateway.triton.transport import Metadata

# Instruction that sets the size of the dynamic table to 0 (RFC 7541, 6.3). Every server must accept
# it.
_NO_TABLE = b"\x20"
_NEVER_INDEXED = b"\x10"
# Maximum bytes of encoded metadata. This is the default limit of gRPC servers, and such a block
# always fits into one frame.
_MAX_METADATA_BYTES = 8192
_METADATA_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+")
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")

# gRPC status code for each HTTP status code (grpc's http-grpc-status-mapping.md). A proxy may
# respond with an HTTP status instead of a gRPC status.
_OF_HTTP = {
    b"400": Status.INTERNAL,
    b"401": Status.UNAUTHENTICATED,
    b"403": Status.PERMISSION_DENIED,
    b"404": Status.UNIMPLEMENTED,
    b"429": Status.UNAVAILABLE,
    b"502": Status.UNAVAILABLE,
    b"503": Status.UNAVAILABLE,
    b"504": Status.UNAVAILABLE,
}

Fields = list[tuple[bytes, bytes]]

_MAX_CACHED_BLOCKS, _MAX_CACHED_BLOCK_BYTES = 64, 512


class StreamStatus(NamedTuple):
    """Decoded header block from the server.

    Attributes:
        fields: all (name, value) pairs, unchanged.
        informational: True if the HTTP status is 1xx, so another header block follows.
        ends: True if the block has a grpc-status, and so ends the RPC (trailers).
        refusal: (gRPC status, text) of an error if the response is not gRPC; otherwise None.
        outcome: (grpc-status, grpc-message). Valid only if the block ends the RPC.
    """

    fields: Fields
    informational: bool
    ends: bool
    refusal: tuple[int, str] | None
    outcome: tuple[int, str]


class BlockDecoder:
    """Decoder of the header blocks of one connection, with a cache of decoded blocks.

    The server sends the same two blocks with every response: headers and trailers. Decoding them
    each time would take 5 % of a request's CPU time, so decoded blocks are cached. The cache is
    cleared when a block changes the dynamic table of HPACK, because the same bytes may then mean
    other fields.
    """

    def __init__(self, max_bytes: int) -> None:
        self._decoder = Decoder(max_bytes)
        self._known: dict[bytes, StreamStatus] = {}

    def decode(self, block: bytes) -> StreamStatus:
        """Decode a header block.

        Raise HPACKError, IndexError or ValueError if the block is invalid. The decoder cannot be
        used after an error."""
        known = self._known.get(block)
        if known is not None:
            return known
        before = self._state()
        fields = [
            (bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)
        ]
        found = dict(fields)
        informational = found.get(b":status", b"")[:1] == b"1"
        ends = b"grpc-status" in found
        status = StreamStatus(fields, informational, ends, _refusal(found), _outcome(found))
        if self._state() != before:
            self._known.clear()
        elif len(block) <= _MAX_CACHED_BLOCK_BYTES and len(self._known) < _MAX_CACHED_BLOCKS:
            self._known[block] = status
        return status

    def _state(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return the size and the entries of HPACK's dynamic table, on which decoding depends."""
        table = self._decoder.header_table
        return table.maxsize, list(table.dynamic_entries)


def request_block(path: str, authority: str, *, tls: bool) -> bytes:
    """Return the encoded header fields that all calls of a method at an endpoint share."""
    fields = {
        ":method": "POST",
        ":scheme": "https" if tls else "http",
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "triton-openai-gateway",
    }
    return _NO_TABLE + b"".join(_literal(name, value) for name, value in fields.items())


def metadata_block(metadata: Metadata) -> bytes:
    """Return gRPC metadata as encoded fields, to append to a header block.

    Raise ValueError if gRPC does not allow the metadata.
    """
    for name, value in metadata.items():
        if not _METADATA_NAME.fullmatch(name) or name.endswith("-bin"):
            raise ValueError(f"{name!r} is no name of text metadata")
        if not _METADATA_VALUE.fullmatch(value):
            raise ValueError(f"the metadata {name!r} must be printable ASCII")
    block = b"".join(_literal(name, value) for name, value in metadata.items())
    if len(block) > _MAX_METADATA_BYTES:
        raise ValueError(f"{len(block)} bytes of metadata are too many")
    return block


def timeout_field(seconds: float) -> bytes:
    return _literal("grpc-timeout", f"{max(1, round(seconds * 1000))}m")


def _literal(name: str, value: str) -> bytes:
    return _NEVER_INDEXED + _string(name) + _string(value)


def _string(text: str) -> bytes:
    """Return a string encoded for HPACK, without Huffman coding.

    The encoded string starts with its length as an integer with a 7-bit prefix (RFC 7541, 5.1).
    """
    raw = text.encode("ascii")
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    length, rest = bytearray([127]), len(raw) - 127
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    length.append(rest)
    return bytes(length) + raw


def _refusal(found: Mapping[bytes, bytes]) -> tuple[int, str] | None:
    status, kind = found.get(b":status", b""), found.get(b"content-type", b"")
    if status != b"200":
        return _OF_HTTP.get(status, Status.UNKNOWN), f"HTTP status {_text(status)}"
    if not kind.startswith(b"application/grpc"):
        return Status.UNKNOWN, f"content-type {_text(kind)}"
    return None


def _outcome(found: Mapping[bytes, bytes]) -> tuple[int, str]:
    status, message = found.get(b"grpc-status", b""), found.get(b"grpc-message", b"")
    if not status:
        return Status.UNKNOWN, "no grpc-status in the trailers"
    if not re.fullmatch(rb"[0-9]{1,3}", status):
        return Status.INTERNAL, "a grpc-status that is no number"
    # Treat codes that gRPC does not define as UNKNOWN.
    known = int(status) if int(status) <= Status.UNAUTHENTICATED else Status.UNKNOWN
    return known, _text(unquote_to_bytes(message))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
