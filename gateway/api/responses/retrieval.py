"""What was answered, again: /v1/responses/{id}, what it was an answer to, and its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api.failures import Failure, build_envelope
from gateway.api.messages import Strict
from gateway.api.queries import describe_parameter, parse_int
from gateway.api.request_log import service_of
from gateway.api.responses.answer_schemas import ResponseObject, streamed
from gateway.api.responses.lists import (
    INCLUDE,
    PAGE,
    ItemList,
    Page,
    check_include,
    page_of,
)
from gateway.api.responses.looks import Asking, Looks, asking
from gateway.api.responses.progress import Status
from gateway.api.responses.stored import Kept, decode
from gateway.api.responses.unfinished import Unfinished
from gateway.api.routing import ApiRouter, Name, needs, refusals
from gateway.api.sse import OPENAI, EventStream
from gateway.conversations.record import Record
from gateway.errors import InvalidRequest

router = ApiRouter()

_STREAM = [
    describe_parameter(
        "stream", "Its events, of one that is made in the background.", type="boolean"
    ),
    describe_parameter(
        "starting_after", "The number of the last event that is known.", type="integer"
    ),
]
_REFUSED = refusals(400, 401, 404, 413, 429, 503)


class ResponseDeleted(Strict):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@router.get(
    "/v1/responses/{response_id}",
    summary="A response that was kept, or is made in the background.",
    response_model=ResponseObject,
    responses={200: streamed(), **_REFUSED},
    openapi_extra=needs("api_key", optional=True, query=[INCLUDE, *_STREAM]),
)
async def retrieve(request: Request, response_id: Name) -> Response:
    check_include(request)
    stream, number = _wished(request)
    async with asking(request) as ask:
        if not stream:
            async with ask.look:
                record, status = await _found(request, ask, response_id)
                return _json(await ask.intake.work(partial(_response, record, status)))
        async with ask.look:
            await _found(request, ask, response_id)
    return followed(request, ask.tenant, response_id, number + 1, {})


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Ends a response that is made in the background.",
    response_model=ResponseObject,
    responses=_REFUSED,
    openapi_extra=needs("api_key", optional=True),
)
async def cancel(request: Request, response_id: Name) -> Response:
    unfinished: Unfinished = request.app.state.unfinished
    async with asking(request) as ask, ask.look:
        record, status = await _found(request, ask, response_id)
        response = await ask.intake.work(lambda: decode(record).response)
        if not response["background"]:
            raise InvalidRequest("Only a response that was made in the background can be ended.")
        if status is not None:
            await unfinished.cancel(ask.tenant, record)
            response["status"] = "cancelled"
        return _json(orjson.dumps(response))


@router.delete(
    "/v1/responses/{response_id}",
    summary="Deletes a response; those that follow it cannot be continued any more.",
    response_model=ResponseDeleted,
    responses=_REFUSED,
    openapi_extra=needs("api_key", optional=True),
)
async def delete(request: Request, response_id: Name) -> Response:
    unfinished: Unfinished = request.app.state.unfinished
    async with asking(request) as ask, ask.look:
        record, _ = await _found(request, ask, response_id)
        await unfinished.delete(ask.tenant, record)
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
        last, _ = await _found(request, ask, response_id)
        found = await ask.intake.work(partial(decode, last))
        await ask.intake.reserve_history(found.nbytes)
        chain = await ask.kept.get(ask.tenant, found.chain)
        return _json(await ask.intake.work(partial(_page, wanted, chain, found)))


def _page(page: Page, chain: Sequence[Record | None], last: Kept) -> bytes:
    """What was deleted meanwhile is not told any more."""
    before = [item for record in chain if record is not None for item in decode(record).items]
    return page.of(before + last.input)


def followed(
    request: Request, tenant: str, response_id: str, place: int, headers: Mapping[str, str]
) -> Response:
    """The events behind the first `place`, and those that are still to come."""
    unfinished: Unfinished = request.app.state.unfinished
    looks: Looks = request.app.state.looks
    write = partial(unfinished.replay, tenant, response_id, place, looks.of(tenant).slots)
    patience_s = service_of(request.scope).settings.keep_alive
    return EventStream(write, headers, patience_s, nullcontext(), _WIRE)


def _failed(error: Failure) -> bytes:
    """Of a stream whose events cannot be read: the response may be well all the same."""
    told = orjson.loads(build_envelope(error))
    told |= {name: told["error"][name] for name in ("code", "message", "param")}
    data = orjson.dumps({"type": "error", "sequence_number": 0} | told)
    return b"event: error\ndata: " + data + b"\n\n"


_WIRE = OPENAI._replace(done=b"", failure=_failed)


async def _found(request: Request, ask: Asking, response_id: str) -> tuple[Record, Status | None]:
    """As `Unfinished.find`."""
    unfinished: Unfinished = request.app.state.unfinished
    record, status = await unfinished.find(ask.tenant, response_id)
    await ask.intake.reserve_history(len(record.data))
    return record, status


def _response(record: Record, status: Status | None) -> bytes:
    response = decode(record).response
    return orjson.dumps(response if status is None else response | {"status": status})


def _wished(request: Request) -> tuple[bool, int]:
    """Whether events are wanted, and behind which number. Raises InvalidRequest."""
    wish = request.query_params.get("stream", "false")
    if wish not in ("true", "false"):
        raise InvalidRequest(f"stream: found {wish!r}; allowed: true and false.", param="stream")
    number = parse_int(request, "starting_after", minimum=0, maximum=2**31)
    if number is not None and wish == "false":
        raise InvalidRequest("starting_after: goes with stream.", param="starting_after")
    return wish == "true", -1 if number is None else number


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
