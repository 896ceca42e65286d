"""One converted adapter as bytes: the same form on disk and in Redis.

Little-endian, version 1::

    0    magic, 8 bytes
    8    u32 version, u32 data type (0 float16, 1 bfloat16)
    16   u64 rows, u64 width
    32   content digest, 32 bytes (`adapters.adapter.content_digest`)
    64   sha256 of the 64 bytes before
    96   32 zero bytes
    128  config, int32 [rows, 3]
    ...  zeros up to the next multiple of 4096
    ...  weights [rows, width], to the end

All lengths follow from rows and width, so there is nothing else to contradict them. The weights
start on a page: they can be mapped and sent as they lie there.
"""

from __future__ import annotations

import hashlib
import struct

from adapters.adapter import DTYPES, ITEM_BYTES, Converted, content_digest

_MAGIC = b"\x89TLORA\r\n"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32s")
_HEADER_BYTES = 128
_PAGE = 4096
_CONFIG_ROW_BYTES = 12


class CorruptBlob(Exception):
    """The bytes are not an intact version of this form; the message says what is wrong."""


def encode(converted: Converted) -> tuple[bytes, memoryview]:
    """(everything before the weights, the weights): written one after the other, uncopied."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        DTYPES.index(converted.dtype),
        converted.rows,
        converted.width,
        bytes.fromhex(converted.digest),
    )
    head = fields + hashlib.sha256(fields).digest()
    head = head.ljust(_HEADER_BYTES, b"\0") + converted.config
    return head.ljust(_weights_offset(converted.rows), b"\0"), memoryview(converted.weights)


def encoded_bytes(converted: Converted) -> int:
    return _weights_offset(converted.rows) + converted.nbytes


def decode(blob: memoryview, digest: str, *, verify: bool = True) -> Converted:
    """The adapter in `blob`, without copying the weights. Raises `CorruptBlob`.

    `digest` is what the bytes were asked for by. ``verify=False`` leaves out the pass over the
    content, for bytes that this process has verified before.
    """
    if len(blob) < _HEADER_BYTES:
        raise CorruptBlob(f"{len(blob)} bytes are too few for a header")
    fields = bytes(blob[: _FIELDS.size])
    if hashlib.sha256(fields).digest() != blob[_FIELDS.size : _FIELDS.size + 32]:
        raise CorruptBlob("the header does not match its checksum")
    magic, version, kind, rows, width, own_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptBlob(f"not version {_VERSION} of this form")
    if own_digest.hex() != digest:
        raise CorruptBlob(f"holds {own_digest.hex()[:12]}, not {digest[:12]}")
    offset = _weights_offset(rows)
    if len(blob) != offset + rows * width * ITEM_BYTES:
        raise CorruptBlob(f"{len(blob)} bytes for {rows} rows of {width}")
    config_end = _HEADER_BYTES + rows * _CONFIG_ROW_BYTES
    config = bytes(blob[_HEADER_BYTES:config_end])
    weights = blob[offset:].toreadonly()
    if verify:
        padding = bytes(blob[_FIELDS.size + 32 : _HEADER_BYTES]) + bytes(blob[config_end:offset])
        if any(padding):
            raise CorruptBlob("the padding is not zero")
        if content_digest(DTYPES[kind], rows, width, config, weights) != digest:
            raise CorruptBlob("the content does not match its digest")
    return Converted(
        dtype=DTYPES[kind], rows=rows, width=width, config=config, weights=weights, digest=digest
    )


def _weights_offset(rows: int) -> int:
    end = _HEADER_BYTES + rows * _CONFIG_ROW_BYTES
    return -(-end // _PAGE) * _PAGE
