"""How many look at once at what is kept of a tenant, as each may hold megabytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from gateway.api.responses.stored import FINISHED, encode
from gateway.conversations.record import Record
from tests.support.in_process import running, save_tokenizer

_ID = "resp_" + "0" * 32
_NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize("query", ["", "?stream=true"])
async def test_few_hold_a_response_while_there_is_no_room_for_it(
    tmp_path: Path, query: str
) -> None:
    save_tokenizer(tmp_path)
    response = orjson.dumps({"id": _ID, "output": "x" * 1_000_000})
    async with running(tmp_path, _NOWHERE, ready=False) as (client, service, _):
        data = encode(response, b"[]", [], 0, turned=False)
        await service.conversations.put("", [Record(_ID, data, FINISHED)])
        async with asyncio.TaskGroup() as asking:
            async with service.bodies.permit("", cost=service.bodies.largest()):
                answers = [
                    asking.create_task(client.get(f"/v1/responses/{_ID}{query}")) for _ in range(12)
                ]
                async with asyncio.timeout(60):
                    while service.bodies.waiting < 4:
                        await asyncio.sleep(0.01)
                for _ in range(12):
                    await client.get("/health/live")
                    await service.conversations.get("", [_ID])
                assert service.bodies.waiting == 4
        # It was not made in the background, so it has no events.
        assert {answer.result().status_code for answer in answers} == {400 if query else 200}
