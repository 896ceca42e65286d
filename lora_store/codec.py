"""Binary format in which the tensors of an adapter are stored on disk and in Redis.

The adapter has already been converted to TensorRT-LLM's two LoRA tensors, which are called config
and weights. All numbers are little-endian. Version 1 of the format::

    0    magic, 8 bytes
    8    u32 version, u32 data type (0 float16, 1 bfloat16)
    16   u64 rows, u64 width
    32   content digest, 32 bytes (`adapters.adapter.content_digest`)
    64   sha256 of the 64 bytes before
    96   32 zero bytes
    128  config, int32 [rows, 3]
    ...  zeros up to the next multiple of 4096
    ...  weights [rows, width], to the end

Rows and width are the dimensions of the adapter's weights tensor. The reader computes the lengths
of config and weights from them.

See decision 061 in docs/decisions.
"""

from __future__ import annotations

import hashlib
import struct

from adapters.adapter import DTYPES, ITEM_BYTES, Converted, Dtype, content_digest

_MAGIC = b"\x89TLORA\r\n"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32s")
HEADER_BYTES = 128
_PAGE = 4096
_CONFIG_ROW_BYTES = 12


class CorruptBlob(Exception):
    """The stored bytes of an adapter version are damaged. The message describes the defect."""


def encode(converted: Converted) -> tuple[bytes, memoryview]:
    """Return an encoded adapter in two parts: (bytes before the weights, weights).

    Write the parts in this order. The weights are not copied.
    """
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        DTYPES.index(converted.dtype),
        converted.rows,
        converted.width,
        bytes.fromhex(converted.digest),
    )
    head = fields + hashlib.sha256(fields).digest()
    head = head.ljust(HEADER_BYTES, b"\0") + converted.config
    return head.ljust(_weights_offset(converted.rows), b"\0"), memoryview(converted.weights)


def encoded_bytes(converted: Converted) -> int:
    """Return the size of the encoded adapter in bytes."""
    return _weights_offset(converted.rows) + converted.nbytes


def decode(blob: bytes, digest: str) -> Converted:
    """Decode an adapter and verify every byte. Raise `CorruptBlob` if it is damaged.

    `digest` is the digest under which `blob` was stored. The returned weights are a view of `blob`.
    They cannot change after the verification, because bytes objects are immutable.
    """
    dtype, rows, width = read_header(blob[:HEADER_BYTES], len(blob), digest)
    offset = _weights_offset(rows)
    config_end = HEADER_BYTES + rows * _CONFIG_ROW_BYTES
    config = blob[HEADER_BYTES:config_end]
    weights = memoryview(blob)[offset:]
    if any(blob[_FIELDS.size + 32 : HEADER_BYTES] + blob[config_end:offset]):
        raise CorruptBlob("the padding is not zero")
    if content_digest(dtype, rows, width, config, weights) != digest:
        raise CorruptBlob("the content does not match its digest")
    return Converted(
        dtype=dtype, rows=rows, width=width, config=config, weights=weights, digest=digest
    )


def read_header(head: bytes, size: int, digest: str) -> tuple[Dtype, int, int]:
    """Return (data type, rows, width) from the header of an encoded adapter.

    Raise `CorruptBlob` if the header is invalid. Callers check the header before they allocate
    memory for the complete adapter.

    Args:
        head: the first HEADER_BYTES bytes of the encoded adapter.
        size: size of the complete encoded adapter in bytes.
        digest: the digest under which the adapter was stored.
    """
    if len(head) < HEADER_BYTES:
        raise CorruptBlob(f"{len(head)} bytes are too few for a header")
    fields = head[: _FIELDS.size]
    if hashlib.sha256(fields).digest() != head[_FIELDS.size : _FIELDS.size + 32]:
        raise CorruptBlob("the header does not match its checksum")
    magic, version, kind, rows, width, own_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or kind >= len(DTYPES):
        raise CorruptBlob(f"not version {_VERSION} of this form")
    if own_digest.hex() != digest:
        raise CorruptBlob(f"holds {own_digest.hex()[:12]}, not {digest[:12]}")
    if size != _weights_offset(rows) + rows * width * ITEM_BYTES:
        raise CorruptBlob(f"{size} bytes for {rows} rows of {width}")
    return DTYPES[kind], rows, width


def _weights_offset(rows: int) -> int:
    end = HEADER_BYTES + rows * _CONFIG_ROW_BYTES
    return -(-end // _PAGE) * _PAGE
