"""Requests that wait for the first replica after none was available."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.scheduling import replicas
from tests.support.in_process import running, save_tokenizer


async def test_a_tenant_has_no_more_than_so_many_waiting_requests(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    most = replicas._MAX_RETURNING_PER_TENANT
    async with running(tmp_path, "127.0.0.1:1", ready=False) as (_, service, _):
        for replica in service.replicas._replicas.values():
            replica.engine.lost_at = asyncio.get_running_loop().time()
        wait = service.replicas.wait_until_back
        many = [asyncio.create_task(wait("many")) for _ in range(most + 1)]
        other = asyncio.create_task(wait("other"))
        await asyncio.sleep(0)
        assert [task.done() for task in many] == [False] * most + [True]
        assert not other.done()
        for task in (*many, other):
            task.cancel()
        await asyncio.gather(*many, other, return_exceptions=True)
        assert not service.replicas._returning
