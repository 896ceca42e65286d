"""Memory held by a request that uploads an adapter's weights."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace

import pytest

from adapters.adapter import Converted
from gateway.generation.lora import Lora
from gateway.triton.engine import Engine
from gateway.triton.transport import ConnectionOptions, TransportName
from tests.support.adapter_store import becomes
from tests.support.fake_triton import FakeTriton, serving
from tests.support.generations import generation
from tests.support.lora_files import content


class Weights(bytearray):
    """Bytes that support weak references, so that the test can see them freed."""


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_weights_that_were_sent_are_not_kept_until_the_first_token(
    transport: TransportName,
) -> None:
    read: list[weakref.ref[Weights]] = []

    async def weights() -> Converted:
        adapter = content(1, 2**20)
        held = Weights(adapter.weights)
        read.append(weakref.ref(held))
        return replace(adapter, weights=held)

    servicer = FakeTriton(tokens=[1], fault="slow", step=0)
    async with serving(servicer) as endpoint:
        engine = Engine(
            endpoint,
            "tensorrt_llm",
            vocab_size=64,
            max_seq_len=64,
            on_stop=lambda _: None,
            on_upload=lambda _: None,
            connection=ConnectionOptions(transport),
        )
        await engine.refresh()
        asked = generation(lora=Lora("zh", 7, 2**20, weights))
        with engine.generate(asked, asyncio.get_running_loop().time() + 600) as tokens:
            first = asyncio.create_task(tokens.first())
            await becomes(lambda: servicer.reached)
            await becomes(lambda: read[0]() is None)
            assert not first.done()
            servicer.released.set()
            assert (await first).final
        await engine.close()
