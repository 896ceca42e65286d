"""Request bodies: their media type, their size, and JSON into a model.

FastAPI would read a body before it asks who sends it, whole, whatever its size, and would take NaN,
a key twice in one object and any depth. So endpoints declare `json_body`, which reads it here.
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
from gateway.http.errors import ContentTooLarge, UnsupportedMediaType

M = TypeVar("M", bound=BaseModel)

LARGE_BODY_BYTES = 64 * 1024
"""Bytes. As many are read of any body; of larger ones the rest is read when there is room."""

# What curl and browsers' fetch send for a body of text when nobody names a type is JSON here too.
_JSON_MEDIA_TYPES = frozenset(
    {"", "application/json", "text/json", "application/x-www-form-urlencoded", "text/plain"}
)

_PLAIN = frozenset({"", "identity"})
_GZIP = frozenset({"gzip", "x-gzip"})


async def read_body(
    request: Request, limit: int, on_large: Callable[[int], Awaitable[None]] | None = None
) -> bytes:
    """The whole body, declared to be JSON or nothing else, as it is or in gzip.

    `on_large` is awaited once before more than LARGE_BODY_BYTES bytes are read, with how many may come.

    Raises UnsupportedMediaType, InvalidRequest for what is no gzip, and ContentTooLarge past
    `limit` bytes, compressed or not, before all is in memory.
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
        # Most are short and have come with their head.
        whole = exchange_of(request.scope).take_complete_body(min(limit, LARGE_BODY_BYTES))
        if whole is not None:
            return whole
    try:
        if on_large is not None and declared > LARGE_BODY_BYTES and not compressed:
            await on_large(declared)
            on_large = None
        # Of a compressed one, what has come is counted too: gzip may go on for ever and give nothing.
        stream = decompress(_stream_limited(request, limit)) if compressed else request.stream()
        async for chunk in stream:
            size += len(chunk)
            if size > limit:
                raise ContentTooLarge("request body", limit)
            if on_large is not None and size > LARGE_BODY_BYTES:  # it did not say
                await on_large(limit)
                on_large = None
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return b"".join(chunks)


async def _stream_limited(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ContentTooLarge past `limit` bytes, and ClientDisconnect."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise ContentTooLarge("request body", limit)
        yield chunk


def json_body(model: type[BaseModel], limit: int | None = None) -> Any:
    """A dependency of FastAPI: the JSON body as `model`.

    Dependencies are called in the order of the endpoint's parameters, so that one that comes after
    the caller's key reads nothing from strangers. `limit`, in bytes, is that of the settings if
    None.
    """

    async def read(request: Request) -> BaseModel:
        max_bytes = service_of(request.scope).settings.max_body_bytes if limit is None else limit
        return await _read_json(request, model, max_bytes)

    return Depends(read)


async def _read_json(request: Request, model: type[M], limit: int) -> M:
    return parse_json(model, await read_body(request, limit))


def parse_json(model: type[M], body: bytes) -> M:
    """An empty body is an empty object. Raises InvalidRequest."""
    try:
        return model.model_validate(load_object(body or b"{}"))
    except ValidationError as error:
        problem = find_problem(error)
        param = join_path(problem.path)
        raise InvalidRequest(f"{param}: {problem.words}.", param=param) from None


def get_media_type(request: Request) -> str:
    """The content-type without its parameters, in lower case; empty when there is none."""
    given = header_of(request.scope, b"content-type") or ""
    return given.partition(";")[0].strip().lower()


def refuse_encoding(request: Request) -> None:
    """Raises UnsupportedMediaType for a compressed body, as RFC 9110 says (8.4.1)."""
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
