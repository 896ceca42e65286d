"""GET /v1/requests/{id}, with which a tenant checks if its request is queued, running or has ended.

A client that aborted a request can see here when the engine has stopped working on that request.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field

from gateway.api.answer_schemas import Count, Described
from gateway.api.auth import Caller
from gateway.api.console.console import Console
from gateway.api.routing import ApiRouter, Name, needs, refusals
from gateway.api.sse import cancel_on_disconnect
from gateway.errors import NotFound

router = ApiRouter()


class RequestSeen(Described):
    """A request that is queued, runs or has ended. Members with unknown values are left out."""

    id: Annotated[str, Field(description="The `x-request-id` of its answer.")]
    object: Literal["request"] = "request"
    state: Literal["queued", "running", "stopping", "ended"]
    model: str
    started: float
    prompt_tokens: Count
    completion_tokens: Count
    ended: float | None = None
    status: Annotated[int | None, Field(description="499 if the client left before the end.")] = (
        None
    )
    stop: Annotated[str | None, Field(description="Why the request was aborted, if it was.")] = None
    stop_ms: Annotated[
        float | None,
        Field(
            description="Milliseconds from the abort until the engine had stopped working on it."
        ),
    ] = None


@router.get(
    "/v1/requests/{request_id}",
    summary="Get a request of this key that runs, or ended within the last minute.",
    response_model_exclude_none=True,
    responses=refusals(401, 404, 503),
    openapi_extra=needs("api_key", optional=True),
)
async def find(request: Request, tenant: Caller, request_id: Name) -> RequestSeen:
    console: Console = request.app.state.console
    async with cancel_on_disconnect(request.scope):
        found = await console.find_anywhere("" if tenant is None else tenant.name, request_id)
    if found is None:
        raise NotFound(f"There is no request `{request_id[:200]}` of this key now.")
    return RequestSeen(**found)
