"""Header blocks: requests as ready-made bytes, and what answers say.

Requests use no HPACK state at all: every field is a literal that is never indexed, so one block
serves any stream of any connection and costs nothing to make. (A hundred bytes more on the wire,
once a request.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from hpack import Decoder

from gateway.triton.failures import Status
from gateway.triton.transport import Metadata

# Announces a dynamic table of size 0 (RFC 7541, 6.3): right whatever size the peer allows.
_NO_TABLE = b"\x20"
_NEVER_INDEXED = b"\x10"
# What gRPC servers take by default. A block so short is always one frame.
_MAX_METADATA_BYTES = 8192
_METADATA_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+")
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")

# HTTP statuses of proxies that answer in place of the server (grpc's http-grpc-status-mapping.md).
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
    """What the server says in a block.

    Attributes:
        fields: as they came.
        informational: whether it is 1xx, so that the real answer is still to come.
        ends: whether it has a grpc-status, as trailers do.
        refusal: what is wrong with an answer that is not gRPC, as (status, text).
        outcome: grpc-status and grpc-message of trailers.
    """

    fields: Fields
    informational: bool
    ends: bool
    refusal: tuple[int, str] | None
    outcome: tuple[int, str]


class BlockDecoder:
    """The blocks that a server sends on one connection.

    It sends the same ones with every answer, and to decode and read those two takes a twentieth of
    all that a request costs here: they are remembered, until one changes what the next ones refer
    to.
    """

    def __init__(self, max_bytes: int) -> None:
        self._decoder = Decoder(max_bytes)
        self._known: dict[bytes, StreamStatus] = {}

    def decode(self, block: bytes) -> StreamStatus:
        """Raises HPACKError, and IndexError or ValueError, of which none leaves it usable."""
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
        """Of the dynamic table, which is all that a block can mean more or less by."""
        table = self._decoder.header_table
        return table.maxsize, list(table.dynamic_entries)


def request_block(path: str, authority: str, *, tls: bool) -> bytes:
    """The block of every call of one method at one endpoint."""
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
    """More fields for the end of a block. Raises ValueError for what gRPC does not allow."""
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
    """A string without Huffman coding; its length in 7 bits and then as many as it takes."""
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
    # Codes that are not known yet are UNKNOWN.
    known = int(status) if int(status) <= Status.UNAUTHENTICATED else Status.UNKNOWN
    return known, _text(unquote_to_bytes(message))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
