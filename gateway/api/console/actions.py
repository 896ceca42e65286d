"""What admins do at a console: end a request, weigh and drain replicas."""

from __future__ import annotations

from typing import Literal

from fastapi import Request

from gateway.api.answer_schemas import Answer
from gateway.api.auth import Admin, Auditor
from gateway.api.console.looks import Console
from gateway.api.routing import ADMIN, Name, Router, needs, refusals
from gateway.errors import NotFound

router = Router()


class RequestCancelled(Answer):
    id: str
    object: Literal["request"] = "request"
    cancelled: Literal[True] = True


@router.post(
    "/v1/admin/requests/{request_id}/cancel",
    summary="Ends a running request; its client is told so.",
    responses=refusals(*ADMIN, 404),
    openapi_extra=needs("admin_key"),
)
async def cancel(request: Request, _: Admin, audit: Auditor, request_id: Name) -> RequestCancelled:
    """`request_id` is its name among `requests` of the state."""
    console: Console = request.app.state.console
    with audit.action("requests.cancel", request_id, None):
        if not (console.cancel(request_id) or await console.cancel_elsewhere(request_id)):
            raise NotFound(f"There is no running request `{request_id[:200]}`.")
    return RequestCancelled(id=request_id)
