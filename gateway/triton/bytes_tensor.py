"""Encoding and decoding of texts in Triton's BYTES tensors.

Each text is encoded as its length in bytes (4 bytes, little-endian), followed by its UTF-8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence


def pack(texts: Sequence[str]) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join([struct.pack("<I", len(text)) + text for text in encoded])


def unpack(raw: bytes) -> list[str]:
    """Return the texts in the raw bytes of a BYTES tensor.

    Invalid UTF-8, such as an incomplete character, becomes U+FFFD.
    """
    texts, position = [], 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4 + length
        texts.append(raw[position - length : position].decode(errors="replace"))
    return texts
