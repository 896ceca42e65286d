"""What was answered, again: /v1/responses/{id}, what it was an answer to, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api.messages import Strict
from gateway.api.responses.answer_schemas import ResponseObject
from gateway.api.responses.lists import INCLUDE, PAGE, ItemList, Page, check_include, page_of
from gateway.api.responses.looks import Asking, asking
from gateway.api.responses.stored import Kept, decode, is_response_id
from gateway.api.routing import Name, Router, needs, refusals
from gateway.conversations.record import Record
from gateway.errors import NotFound

router = Router()

_REFUSED = refusals(400, 401, 404, 413, 429, 503)


class ResponseDeleted(Strict):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@router.get(
    "/v1/responses/{response_id}",
    summary="A response that was kept.",
    response_model=ResponseObject,
    responses=_REFUSED,
    openapi_extra=needs("api_key", optional=True, query=[INCLUDE]),
)
async def retrieve(request: Request, response_id: Name) -> Response:
    check_include(request)
    async with asking(request) as ask, ask.look:
        record = await _kept(ask, response_id)
        return _json(await ask.intake.work(lambda: orjson.dumps(decode(record).response)))


@router.delete(
    "/v1/responses/{response_id}",
    summary="Deletes a response; those that follow it cannot be continued any more.",
    response_model=ResponseDeleted,
    responses=_REFUSED,
    openapi_extra=needs("api_key", optional=True),
)
async def delete(request: Request, response_id: Name) -> Response:
    async with asking(request) as ask, ask.look:
        await _kept(ask, response_id)
        await ask.kept.delete(ask.tenant, [response_id])
        return _json(orjson.dumps(ResponseDeleted(id=response_id).model_dump()))


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="What a response was an answer to, a page at a time.",
    response_model=ItemList,
    responses=_REFUSED,
    openapi_extra=needs("api_key", optional=True, query=PAGE),
)
async def list_input_items(request: Request, response_id: Name) -> Response:
    wanted = page_of(request)
    async with asking(request) as ask, ask.look:
        last = await _kept(ask, response_id)
        found = await ask.intake.work(partial(decode, last))
        await ask.intake.make_room(found.nbytes)
        chain = await ask.kept.get(ask.tenant, found.chain)
        return _json(await ask.intake.work(partial(_page, wanted, chain, found)))


def _page(page: Page, chain: Sequence[Record | None], last: Kept) -> bytes:
    """What was deleted meanwhile is not told any more."""
    before = [item for record in chain if record is not None for item in decode(record).items]
    return page.of(before + last.input)


async def _kept(ask: Asking, response_id: str) -> Record:
    """Raises NotFound."""
    [record] = (
        await ask.kept.get(ask.tenant, [response_id]) if is_response_id(response_id) else [None]
    )
    if record is None:
        raise NotFound(f"Response with id '{response_id}' not found.")
    await ask.intake.make_room(len(record.data))
    return record


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
