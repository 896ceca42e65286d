"""Warnings about a replica are reported only while the replica serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer

_WITHIN_S = 300.0


class _Odd(FakeTriton):
    """A model whose configuration names a tokenizer that cannot be read."""

    def __init__(self, tokenizer_dir: Path) -> None:
        super().__init__(tokens=[65], fault=None, step=0)
        self._tokenizer_dir = tokenizer_dir
        self.is_there = True

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self.is_there and request.name == "tensorrt_llm")

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        answer = await super().ModelConfig(request, context)
        answer.config.parameters["tokenizer_dir"].string_value = str(self._tokenizer_dir)
        return answer


async def test_a_warning_of_a_replica_lasts_while_the_replica_serves(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "broken").mkdir()
    triton = _Odd(tmp_path / "broken")
    async with serving(triton) as endpoint, running(tmp_path, endpoint) as (client, service, _):

        async def until(met: bool) -> None:
            async with asyncio.timeout(_WITHIN_S):
                while (f"engines {endpoint}" in service.troubles.facts()) is not met:
                    await asyncio.sleep(0.01)

        await until(True)
        shown = service.troubles.facts()[f"engines {endpoint}"]["text"]
        assert f"tokenizer_dir {tmp_path / 'broken'} cannot be compared" in shown
        assert shown in (await client.get("/health/ready")).text
        triton.is_there = False
        await until(False)
        triton.is_there = True
        await until(True)
