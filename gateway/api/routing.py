"""FastAPI router, and OpenAPI descriptions that FastAPI cannot derive from signatures."""

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
"""Error statuses of endpoints that read a body."""
ADMIN = (401, 403, 429)
"""Error statuses of endpoints for admins."""
_DESCRIPTIONS = {
    400: "The request is malformed, or a parameter is out of range or not supported.",
    401: "The key is missing or wrong.",
    403: "This key may not do this, or the feature is disabled.",
    404: "The object does not exist, or not for this key.",
    413: "The body is larger than this server takes.",
    415: "The body is of another media type.",
    429: "A limit of this key is reached; retry-after says when to try again. Or this address has "
    "sent many wrong admin keys.",
    500: "The server or its engine failed; a retry does not help.",
    502: "The model's answer is invalid: not finite, or of a wrong shape.",
    503: "The engine is not ready or too busy, or this server shuts down; try again.",
    504: "The request took longer than this server allows.",
}


_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}

Name = Annotated[str, Path(json_schema_extra={"minLength": 1})]
"""The name or id of an object, as a path parameter.

Empty strings are accepted here, so that the client gets the error for an unknown name.
"""


def _build_operation_id(route: APIRoute) -> str:
    return f"{route.endpoint.__module__.rpartition('.')[2]}.{route.endpoint.__name__}"


@contextmanager
def _without_pydantic_1() -> Iterator[None]:
    """Prevent FastAPI from importing `pydantic.v1`, which would take 1.4 MiB of memory.

    FastAPI imports the module to check whether a route's models are of pydantic 1. None in
    `sys.modules` makes the import fail. FastAPI then assumes that pydantic has no such module.
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
    """A router that adds HEAD to each GET route (RFC 9110, 9.1).

    The OpenAPI document lists only GET.
    """

    def __init__(self) -> None:
        super().__init__(generate_unique_id_function=_build_operation_id)

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
    """Return a route's `responses` for these error statuses and for 500."""
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
    """Return a route's `openapi_extra`: the parts of a request that FastAPI does not read itself.

    Args:
        key: the kind of API key that the route accepts; None if it needs no key.
        optional: True if requests without a key may also be accepted.
        json: the model of a JSON body; `openapi.build` adds its schema to the document.
        form: the schema of a multipart form.
        empty: True if the body may be left out.
        query: descriptions of query parameters.
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
    """Return a `$ref` to a model's schema in the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}
