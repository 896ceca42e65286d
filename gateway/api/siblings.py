"""Requests to the other worker processes of this gateway, over Unix sockets in a shared folder."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request

from gateway.http.http_errors import UnknownUrl

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_MAX_BODY_BYTES = 64 * 2**20


class WorkerResponse(NamedTuple):
    """Status and body returned by another worker."""

    status: int
    body: bytes


def is_internal(request: Request) -> bool:
    """Return True if another worker sent the request.

    Other workers send their requests over a Unix socket, so the server address has no port.
    """
    return request.app.state.worker is not None and request.scope["server"][1] is None


def check_internal(request: Request) -> None:
    """Raise UnknownUrl unless another worker sent the request."""
    if not is_internal(request):
        raise UnknownUrl(request.method, request.url.path)


async def ask(path: Path, target: str, method: str = "GET") -> WorkerResponse | None:
    """Send a request to the worker at the socket `path` and return the response.

    Return None if the worker does not answer in time, for example because it is starting or stuck.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await _ask(path, target, method)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        log.warning("worker %s does not answer: %r", path.stem, error)
        return None


async def _ask(path: Path, target: str, method: str) -> WorkerResponse:
    reader, writer = await asyncio.open_unix_connection(str(path), limit=2**20)
    try:
        head = f"{method} {target} HTTP/1.1\r\nhost: worker\r\ncontent-length: 0\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode("ascii"))
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        status = int(lines[0].split(b" ", 2)[1])
        fields = dict(line.lower().split(b": ", 1) for line in lines[1:] if line)
        size = int(fields.get(b"content-length", b"0"))
        if not 0 <= size <= _MAX_BODY_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        return WorkerResponse(status, await reader.readexactly(size))
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
