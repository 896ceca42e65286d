"""Request bodies with a size limit."""

from __future__ import annotations

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.errors import ClientDisconnected, ContentTooLarge


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ContentTooLarge past `limit` bytes, before it is all in memory."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise ContentTooLarge(f"The request body is larger than {limit} bytes.")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return b"".join(chunks)
