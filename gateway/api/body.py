"""Request bodies: their media type, their size, and JSON into a model."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from gateway.api.strict_json import load_object
from gateway.errors import ClientDisconnected, InvalidRequest
from gateway.http.errors import ContentTooLarge, UnsupportedMediaType

M = TypeVar("M", bound=BaseModel)

# What curl and browsers' fetch send for a body of text when nobody names a type is JSON here too.
_TAKEN_FOR_JSON = frozenset(
    {"", "application/json", "text/json", "application/x-www-form-urlencoded", "text/plain"}
)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, said to be JSON or nothing else.

    Raises UnsupportedMediaType, and ContentTooLarge past `limit` bytes, before all is in memory.
    """
    given = media_type(request)
    if given not in _TAKEN_FOR_JSON and not given.endswith("+json"):
        raise UnsupportedMediaType("content-type", given, "application/json")
    refuse_encoding(request)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise ContentTooLarge("request body", limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientDisconnected from None
    return b"".join(chunks)


async def read_json(request: Request, model: type[M], limit: int = 64 * 1024) -> M:
    """A small JSON body; an empty one is an empty object. Raises InvalidRequest."""
    body = await read_body(request, limit)
    try:
        return model.model_validate(load_object(body or b"{}"))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, problem["loc"]))
        raise InvalidRequest(f"{param}: {problem['msg']}.", param=param) from None


def media_type(request: Request) -> str:
    """The content-type without its parameters, in lower case; empty when there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def refuse_encoding(request: Request) -> None:
    """Raises UnsupportedMediaType for a compressed body, as RFC 9110 says (8.4.1)."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise UnsupportedMediaType("content-encoding", encoding, "identity")
