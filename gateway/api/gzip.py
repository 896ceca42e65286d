"""Streaming decompression of gzip bodies, with small chunks so that the size can be limited."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from gateway.errors import InvalidRequest

PIECE_BYTES = 64 * 1024
"""Maximum size in bytes of a decompressed chunk.

Decompressing a chunk of this size takes a fraction of a millisecond.
"""

_GZIP = 16 + zlib.MAX_WBITS  # the gzip format (RFC 1952)
_WRONG = "content-encoding: the body is not one complete gzip stream."


async def decompress(packed: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the decompressed body in chunks of at most `PIECE_BYTES` bytes.

    The event loop can run other tasks between two chunks. Raise InvalidRequest if the body is not
    gzip, is truncated, or has data after its end.
    """
    inflater = zlib.decompressobj(_GZIP)
    async for chunk in packed:
        left = chunk
        try:
            while True:
                piece = inflater.decompress(left, PIECE_BYTES)
                yield piece
                left = inflater.unconsumed_tail
                if not left and len(piece) < PIECE_BYTES:
                    break
                await asyncio.sleep(0)
        except zlib.error:
            raise InvalidRequest(_WRONG) from None
        if inflater.unused_data:
            raise InvalidRequest(_WRONG)
    if not inflater.eof:
        raise InvalidRequest(_WRONG)
