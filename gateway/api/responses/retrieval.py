"""Endpoints of stored responses: /v1/responses/{id}, its input items, its cancellation and
deletion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api.failures import Failure, build_envelope
from gateway.api.openai.messages import Strict
from gateway.api.queries import describe_parameter, parse_int
from gateway.api.request_log import service_of
from gateway.api.responses.answer_schemas import ResponseObject, describe_stream
from gateway.api.responses.lists import (
    INCLUDE,
    PAGE,
    ItemList,
    Page,
    check_include,
    parse_page,
)
from gateway.api.responses.looks import StoredLookup, TenantReadLimiter, open_lookup
from gateway.api.responses.progress import Status
from gateway.api.responses.stored import StoredResponse, decode
from gateway.api.responses.unfinished import UnfinishedResponses
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
_ERROR_RESPONSES = refusals(400, 401, 404, 413, 429, 503)


class ResponseDeleted(Strict):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@router.get(
    "/v1/responses/{response_id}",
    summary="A stored response, or one that is made in the background.",
    response_model=ResponseObject,
    responses={200: describe_stream(), **_ERROR_RESPONSES},
    openapi_extra=needs("api_key", optional=True, query=[INCLUDE, *_STREAM]),
)
async def retrieve(request: Request, response_id: Name) -> Response:
    check_include(request)
    stream, number = _parse_stream_query(request)
    async with open_lookup(request) as lookup:
        if not stream:
            async with lookup.slot:
                record, status = await _find(request, lookup, response_id)
                return _json_response(
                    await lookup.intake.work(partial(_build_response, record, status))
                )
        async with lookup.slot:
            await _find(request, lookup, response_id)
    return stream_events(request, lookup.tenant, response_id, number + 1, {})


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Ends a response that is made in the background.",
    response_model=ResponseObject,
    responses=_ERROR_RESPONSES,
    openapi_extra=needs("api_key", optional=True),
)
async def cancel(request: Request, response_id: Name) -> Response:
    unfinished: UnfinishedResponses = request.app.state.unfinished
    async with open_lookup(request) as lookup, lookup.slot:
        record, status = await _find(request, lookup, response_id)
        response = await lookup.intake.work(lambda: decode(record).response)
        if not response["background"]:
            raise InvalidRequest("Only a response that was made in the background can be ended.")
        if status is not None:
            await unfinished.cancel(lookup.tenant, record)
            response["status"] = "cancelled"
        return _json_response(orjson.dumps(response))


@router.delete(
    "/v1/responses/{response_id}",
    summary="Deletes a response; those that follow it cannot be continued any more.",
    response_model=ResponseDeleted,
    responses=_ERROR_RESPONSES,
    openapi_extra=needs("api_key", optional=True),
)
async def delete(request: Request, response_id: Name) -> Response:
    unfinished: UnfinishedResponses = request.app.state.unfinished
    async with open_lookup(request) as lookup, lookup.slot:
        record, _ = await _find(request, lookup, response_id)
        await unfinished.delete(lookup.tenant, record)
        return _json_response(orjson.dumps(ResponseDeleted(id=response_id).model_dump()))


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="What a response was an answer to, a page at a time.",
    response_model=ItemList,
    responses=_ERROR_RESPONSES,
    openapi_extra=needs("api_key", optional=True, query=PAGE),
)
async def list_input_items(request: Request, response_id: Name) -> Response:
    wanted = parse_page(request)
    async with open_lookup(request) as lookup, lookup.slot:
        last, _ = await _find(request, lookup, response_id)
        found = await lookup.intake.work(partial(decode, last))
        await lookup.intake.reserve_history(found.nbytes)
        chain = await lookup.conversations.get(lookup.tenant, found.chain)
        return _json_response(await lookup.intake.work(partial(_build_page, wanted, chain, found)))


def _build_page(page: Page, chain: Sequence[Record | None], last: StoredResponse) -> bytes:
    """Return a page of a response's input items as JSON. Items of earlier responses that have been
    deleted are omitted."""
    before = [item for record in chain if record is not None for item in decode(record).items]
    return page.render(before + last.input)


def stream_events(
    request: Request, tenant: str, response_id: str, sent: int, headers: Mapping[str, str]
) -> Response:
    """Return a stream of a background response's events, including events that are generated later.

    The first `sent` events are skipped, because the client already has them.
    """
    unfinished: UnfinishedResponses = request.app.state.unfinished
    read_limiter: TenantReadLimiter = request.app.state.read_limiter
    write = partial(
        unfinished.replay, tenant, response_id, sent, read_limiter.for_tenant(tenant).slots
    )
    patience_s = service_of(request.scope).settings.keep_alive
    return EventStream(write, headers, patience_s, nullcontext(), _WIRE)


def _frame_failure(error: Failure) -> bytes:
    """Return the event that ends the stream if the response's events cannot be read.

    The event has the type `error`, not `response.failed`: the response itself has not failed.
    """
    fields = orjson.loads(build_envelope(error))
    fields |= {name: fields["error"][name] for name in ("code", "message", "param")}
    data = orjson.dumps({"type": "error", "sequence_number": 0} | fields)
    return b"event: error\ndata: " + data + b"\n\n"


_WIRE = OPENAI._replace(done=b"", failure=_frame_failure)


async def _find(
    request: Request, lookup: StoredLookup, response_id: str
) -> tuple[Record, Status | None]:
    """Return the result of `UnfinishedResponses.find`, and reserve memory for the record."""
    unfinished: UnfinishedResponses = request.app.state.unfinished
    record, status = await unfinished.find(lookup.tenant, response_id)
    await lookup.intake.reserve_history(len(record.data))
    return record, status


def _build_response(record: Record, status: Status | None) -> bytes:
    response = decode(record).response
    return orjson.dumps(response if status is None else response | {"status": status})


def _parse_stream_query(request: Request) -> tuple[bool, int]:
    """Parse the query of a request for a stored response.

    Return True if the client wants a stream of the response's events. Also return the sequence
    number after which the stream starts; -1 to start with the first event. Raise InvalidRequest if
    a parameter is invalid.
    """
    stream = request.query_params.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidRequest(f"stream: found {stream!r}; allowed: true and false.", param="stream")
    number = parse_int(request, "starting_after", minimum=0, maximum=2**31)
    if number is not None and stream == "false":
        raise InvalidRequest("starting_after: goes with stream.", param="starting_after")
    return stream == "true", -1 if number is None else number


def _json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")
