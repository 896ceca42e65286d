"""FastAPI's routes, and what the OpenAPI document says that their signatures do not tell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from fastapi.routing import APIRoute
from pydantic import BaseModel

Schema = dict[str, Any]
Key = Literal["api_key", "admin_key"]

BODY = (400, 413, 415)
"""What any endpoint with a body may refuse it with."""
ADMIN = (401, 403, 429)
"""How any endpoint for admins may refuse who asks."""
_DESCRIPTIONS = {
    400: "The request is malformed, or a parameter is out of range or not supported.",
    401: "No key, or a wrong one.",
    403: "This key may not do this, or nobody may on this server.",
    404: "No such model, adapter or key, for who asks.",
    413: "The body is larger than this server takes.",
    415: "The body is of another media type.",
    429: "A limit of this key is reached; retry-after says when to try again. Or many wrong admin "
    "keys came from this address.",
    500: "The server or its engine failed; a retry does not help.",
    502: "The model's answer is none: not finite, or of a wrong shape.",
    503: "The engine is not ready or too busy, or this server is ending; try again.",
    504: "The request took longer than this server allows.",
}


_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}

Name = Annotated[str, Path(json_schema_extra={"minLength": 1})]
"""A path's parameter. Nothing has an empty name, so that one is unknown and not malformed."""


def _operation_id(route: APIRoute) -> str:
    return f"{route.endpoint.__module__.rpartition('.')[2]}.{route.endpoint.__name__}"


@contextmanager
def _without_pydantic_1() -> Iterator[None]:
    """FastAPI asks of each route's models whether they are pydantic 1's, and loads that to know.

    None are; it would be 1.4 MiB that nothing else uses. A module of None cannot be imported, which
    FastAPI takes for a pydantic that has it no more.
    """
    name = "pydantic.v1"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


class ApiRouter(APIRouter):
    """Whatever answers GET answers HEAD as well (RFC 9110, 9.1); the document lists GET alone."""

    def __init__(self) -> None:
        super().__init__(generate_unique_id_function=_operation_id)

    def add_api_route(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        methods = list(methods or ["GET"])
        if "GET" in methods:
            methods.append("HEAD")
        with _without_pydantic_1():
            super().add_api_route(path, endpoint, methods=methods, **options)


def refusals(*statuses: int) -> dict[int | str, Schema]:
    """The errors of an operation, for its `responses`; any may fail with 500."""
    return {
        status: {"description": _DESCRIPTIONS[status], "content": _ERROR}
        for status in sorted({*statuses, 500})
    }


def needs(
    key: Key | None = None,
    *,
    optional: bool = False,
    json: type[BaseModel] | None = None,
    form: Schema | None = None,
    empty: bool = False,
    query: Sequence[Schema] = (),
) -> Schema:
    """What we read of a request ourselves, for the `openapi_extra` of its operation.

    `optional` is a key that not every gateway asks for; `empty` a body that may be left out;
    `query` are parameters, as the document has them.
    `openapi.build` puts the schemas of JSON bodies into the document.
    """
    described: Schema = {}
    if key is not None:
        described["security"] = [*([{}] if optional else []), {key: []}]
    body: Schema = {}
    if form is not None:
        body["multipart/form-data"] = {"schema": form}
    if json is not None:
        body["application/json"] = {"schema": reference(json)}
    if body:
        described["requestBody"] = {"required": not empty, "content": body}
    if query:
        described["parameters"] = [*query]
    return described


def reference(model: type[BaseModel]) -> Schema:
    """To its schema in the document."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}
