"""Request bodies: checks of media type and size, and JSON parsing.

FastAPI would read a complete body of any size before it authenticates the caller. It would also
accept NaN, duplicate keys and any nesting depth. So endpoints depend on `json_body` instead.

See decision 037 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from gateway.api.gzip import decompress
from gateway.api.request_log import exchange_of, header_of, service_of
from gateway.api.strict_json import load_object
from gateway.api.validation import find_problem, join_path
from gateway.errors import ClientDisconnected, InvalidRequest
from gateway.http.http_errors import ContentTooLarge, UnsupportedMediaType

M = TypeVar("M", bound=BaseModel)

LARGE_BODY_BYTES = 64 * 1024
"""Size in bytes above which a request body counts as large.

A request reads at most so many bytes before it gets a share of the memory budget for bodies.
"""

# Accepted media types of a JSON body. curl and `fetch` in browsers send the last two by default.
_JSON_MEDIA_TYPES = frozenset(
    {"", "application/json", "text/json", "application/x-www-form-urlencoded", "text/plain"}
)

_PLAIN = frozenset({"", "identity"})
_GZIP = frozenset({"gzip", "x-gzip"})


async def read_body(
    request: Request, limit: int, on_large: Callable[[int], Awaitable[None]] | None = None
) -> bytes:
    """Return the bytes of a complete JSON body, decompressed if it was sent in gzip.

    Args:
        request: the request.
        limit: maximum size in bytes, both as sent and after decompression.
        on_large: awaited once, before more than LARGE_BODY_BYTES are read. Its argument is the size
            of the body in bytes, or `limit` if the size is not known yet.

    Raises:
        UnsupportedMediaType: The body is not JSON, or has an unknown encoding.
        InvalidRequest: The body is not valid gzip.
        ContentTooLarge: The body exceeds `limit`. Raised before the complete body is in memory.
        ClientDisconnected: The client left.
    """
    given = get_media_type(request)
    if given not in _JSON_MEDIA_TYPES and not given.endswith("+json"):
        raise UnsupportedMediaType("content-type", given, "application/json")
    compressed = _is_compressed(request)
    chunks: list[bytes] = []
    size = 0
    declared = int(header_of(request.scope, b"content-length") or "0")
    if declared > limit:
        raise ContentTooLarge("request body", limit)
    if not compressed:
        # Fast path: most bodies are short and arrive together with the headers.
        whole = exchange_of(request.scope).take_complete_body(min(limit, LARGE_BODY_BYTES))
        if whole is not None:
            return whole
    try:
        if on_large is not None and declared > LARGE_BODY_BYTES and not compressed:
            await on_large(declared)
            on_large = None
        # Limit the compressed bytes too: an endless gzip stream may decompress to no bytes at all.
        stream = decompress(_stream_limited(request, limit)) if compressed else request.stream()
        async for chunk in stream:
            size += len(chunk)
            if size > limit:
                raise ContentTooLarge("request body", limit)
            if on_large is not None and size > LARGE_BODY_BYTES:  # size unknown until now
                await on_large(limit)
                on_large = None
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return b"".join(chunks)


async def _stream_limited(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raise ContentTooLarge above `limit` bytes, and ClientDisconnect
    if the client leaves."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise ContentTooLarge("request body", limit)
        yield chunk


def json_body(model: type[BaseModel], limit: int | None = None) -> Any:
    """Return a FastAPI dependency that reads the JSON body as `model`.

    FastAPI runs dependencies in the order of the endpoint's parameters. Put this dependency after
    the one that checks the caller's key. Otherwise the body of a caller without a valid key would
    be read, too. `limit` is the maximum size in bytes; None for the setting `max_body_bytes`.
    """

    async def read(request: Request) -> BaseModel:
        max_bytes = service_of(request.scope).settings.max_body_bytes if limit is None else limit
        return await _read_json(request, model, max_bytes)

    return Depends(read)


async def _read_json(request: Request, model: type[M], limit: int) -> M:
    return parse_json(model, await read_body(request, limit))


def parse_json(model: type[M], body: bytes) -> M:
    """Parse a JSON body as `model`. An empty body counts as `{}`.

    Raise InvalidRequest if the body is not valid JSON or does not fit the model.
    """
    try:
        return model.model_validate(load_object(body or b"{}"))
    except ValidationError as error:
        problem = find_problem(error)
        param = join_path(problem.path)
        raise InvalidRequest(f"{param}: {problem.words}.", param=param) from None


def get_media_type(request: Request) -> str:
    """Return the content-type in lower case without parameters; empty if it is missing."""
    given = header_of(request.scope, b"content-type") or ""
    return given.partition(";")[0].strip().lower()


def refuse_encoding(request: Request) -> None:
    """Raise UnsupportedMediaType if the body is compressed (RFC 9110, 8.4.1)."""
    encoding = _get_encoding(request)
    if encoding not in _PLAIN:
        raise UnsupportedMediaType("content-encoding", encoding, "identity")


def _is_compressed(request: Request) -> bool:
    encoding = _get_encoding(request)
    if encoding not in _PLAIN | _GZIP:
        raise UnsupportedMediaType("content-encoding", encoding, "gzip, identity")
    return encoding in _GZIP


def _get_encoding(request: Request) -> str:
    return (header_of(request.scope, b"content-encoding") or "identity").strip().lower()
