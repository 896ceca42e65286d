"""Limits on concurrent lookups of stored responses, as each may hold megabytes in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.api.responses.stored import FINISHED, encode
from gateway.conversations.record import Record
from tests.support.in_process import running, save_tokenizer

_ID = "resp_" + "0" * 32
_NOWHERE = "127.0.0.1:1"


@contextlib.asynccontextmanager
async def _keeping_one(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """Run a gateway that has stored one large response."""
    save_tokenizer(folder)
    response = orjson.dumps({"id": _ID, "output": "x" * 1_000_000})
    data = encode(response, b"[]", [], 0, turned=False)
    async with running(folder, _NOWHERE, ready=False) as (client, service, _):
        await service.conversations.put("", [Record(_ID, data, FINISHED)])
        yield client, service


@pytest.mark.parametrize("query", ["", "?stream=true"])
async def test_few_hold_a_response_while_there_is_no_room_for_it(
    tmp_path: Path, query: str
) -> None:
    async with _keeping_one(tmp_path) as (client, service):
        async with asyncio.TaskGroup() as asking:
            async with service.history_budget.permit("", cost=service.history_budget.max_cost()):
                answers = [
                    asking.create_task(client.get(f"/v1/responses/{_ID}{query}")) for _ in range(12)
                ]
                async with asyncio.timeout(300):
                    while service.history_budget.waiting < 4:
                        await asyncio.sleep(0.01)
                for _ in range(12):
                    await client.get("/health/live")
                    await service.conversations.get("", [_ID])
                assert service.history_budget.waiting == 4
        # The response was not made in the background, so it has no events to stream.
        assert {answer.result().status_code for answer in answers} == {400 if query else 200}


async def test_large_bodies_that_wait_for_a_look_let_those_end_who_look(tmp_path: Path) -> None:
    async with _keeping_one(tmp_path) as (client, service):
        # Large requests that wait for a lookup may use up the body budget. Lookups must still end.
        async with service.body_budget.permit("", cost=service.body_budget.max_cost()):
            answer = await client.get(f"/v1/responses/{_ID}")
            assert answer.status_code == 200
