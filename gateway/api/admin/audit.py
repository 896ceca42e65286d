"""GET /v1/audit: the audit log of admins' actions."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import Request
from pydantic import Field

from gateway.api.answer_schemas import AnswerModel, Count
from gateway.api.auth import Admin
from gateway.api.queries import describe_parameter, parse_int
from gateway.api.routing import ADMIN, ApiRouter, needs, refusals
from gateway.errors import NotFound
from gateway.observability.audit import read_entries

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100

router = ApiRouter()


class AuditEntry(AnswerModel):
    id: str
    object: Literal["audit.entry"] = "audit.entry"
    created_at: Count
    admin: Annotated[str, Field(description="The beginning of the hash of the admin's key.")]
    action: str
    target: str
    outcome: Annotated[str, Field(description='"done", or the type of the error.')]
    before: Annotated[Any, Field(description="The changed object before; null if there was none.")]
    after: Annotated[Any, Field(description="The changed object after; null if there is none.")]


class AuditEntries(AnswerModel):
    object: Literal["list"] = "list"
    data: list[AuditEntry]
    has_more: bool


@router.get(
    "/v1/audit",
    summary="List the actions of admins, newest first, a page at a time.",
    responses=refusals(400, *ADMIN, 404, 503),
    openapi_extra=needs(
        "admin_key",
        query=[
            describe_parameter(
                "limit", "How many at most.", type="integer", minimum=1, maximum=_MAX_LIMIT
            ),
            describe_parameter("after", "The last id of the page before.", type="string"),
        ],
    ),
)
async def list_entries(request: Request, service: Admin) -> AuditEntries:
    limit = parse_int(request, "limit", minimum=1, maximum=_MAX_LIMIT) or _DEFAULT_LIMIT
    after = request.query_params.get("after")
    found = None
    # An id consists of letters and digits. Other strings may contain NUL, which PostgreSQL refuses.
    if after is None or after.isalnum():
        found = await service.database.read(partial(read_entries, before=after, limit=limit + 1))
    if found is None:
        raise NotFound(f"There is no entry `{(after or '')[:200]}` in the audit log.")
    entries = [
        AuditEntry(
            id=entry.id,
            created_at=entry.at,
            admin=entry.admin,
            action=entry.action,
            target=entry.target,
            outcome=entry.outcome,
            before=orjson.loads(entry.before),
            after=orjson.loads(entry.after),
        )
        for entry in found[:limit]
    ]
    return AuditEntries(data=entries, has_more=len(found) > limit)
