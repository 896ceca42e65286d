"""Bodies in gzip, a piece at a time, so that what a few bytes become is counted as it comes."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from gateway.errors import InvalidRequest

PIECE_BYTES = 64 * 1024
"""Bytes that are decompress at once: a fraction of a millisecond."""

_GZIP = 16 + zlib.MAX_WBITS  # a gzip stream, as RFC 1952 has it
_WRONG = "content-encoding: the body is not one whole gzip stream."


async def decompress(packed: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The body in pieces of at most `PIECE_BYTES` bytes. Others have their turn between two of them.

    Raises InvalidRequest for what is no gzip stream, is cut, or goes on behind its end.
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
