"""Internal endpoints that the workers of one gateway call to collect data for consoles.

Other clients get 404.
"""

from __future__ import annotations

from typing import Annotated

import orjson
from fastapi import Depends, Request
from starlette.responses import Response

from gateway.api.console.console import INTERNAL, Console
from gateway.api.routing import ApiRouter
from gateway.api.siblings import check_internal

router = ApiRouter()


async def _get_console(request: Request) -> Console:
    check_internal(request)
    console: Console = request.app.state.console
    return console


Own = Annotated[Console, Depends(_get_console)]


@router.get(f"{INTERNAL}/part", include_in_schema=False)
async def part(console: Own) -> Response:
    return _build_json_response(await console.part.get())


@router.post(f"{INTERNAL}/requests/{{request_id}}/cancel", include_in_schema=False)
async def cancel(console: Own, request_id: str) -> Response:
    return Response(status_code=200 if console.cancel(request_id) else 404)


@router.get(f"{INTERNAL}/requests/{{request_id}}", include_in_schema=False)
async def find(console: Own, request_id: str, tenant: str = "") -> Response:
    found = console.find(tenant, request_id)
    return Response(status_code=404) if found is None else _build_json_response(found)


def _build_json_response(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
