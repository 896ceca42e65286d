"""Request bodies, with a size limit."""

from __future__ import annotations

from typing import TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from gateway.errors import ClientDisconnected, ContentTooLarge, InvalidRequest

M = TypeVar("M", bound=BaseModel)


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


async def read_json(request: Request, model: type[M], limit: int = 64 * 1024) -> M:
    """A small JSON body; an empty one is an empty object. Raises InvalidRequest."""
    body = await read_body(request, limit)
    try:
        return model.model_validate(orjson.loads(body or b"{}"))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, problem["loc"]))
        raise InvalidRequest(f"{param}: {problem['msg']}.", param=param) from None
