"""Request bodies: their media type, their size, and JSON into a model.

FastAPI would read a body before it asks who sends it, whole, whatever its size, and would take NaN,
a key twice in one object and any depth. So endpoints declare `json_body`, which reads it here.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from gateway.api.strict_json import load_object
from gateway.api.validation import location, words
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


def json_body(model: type[BaseModel], limit: int | None = None) -> Any:
    """A dependency of FastAPI: the JSON body as `model`.

    Dependencies are called in the order of the endpoint's parameters, so that one that comes after
    the caller's key reads nothing from strangers. `limit`, in bytes, is that of the settings if
    None.
    """

    async def read(request: Request) -> BaseModel:
        most = request.app.state.service.settings.max_body_bytes if limit is None else limit
        return await _read_json(request, model, most)

    return Depends(read)


async def _read_json(request: Request, model: type[M], limit: int) -> M:
    """A JSON body; an empty one is an empty object. Raises InvalidRequest."""
    body = await read_body(request, limit)
    try:
        return model.model_validate(load_object(body or b"{}"))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, location(problem)))
        raise InvalidRequest(f"{param}: {words(problem)}.", param=param) from None


def media_type(request: Request) -> str:
    """The content-type without its parameters, in lower case; empty when there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def refuse_encoding(request: Request) -> None:
    """Raises UnsupportedMediaType for a compressed body, as RFC 9110 says (8.4.1)."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise UnsupportedMediaType("content-encoding", encoding, "identity")
