"""A scripted Triton with an adapter cache. Its answers last until a test ends them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.support.fake_triton import FakeTriton, _response


class LoraTriton(FakeTriton):
    """A fake Triton with TensorRT-LLM's cache policy: an upload evicts idle adapters or fails.

    An answer has one token immediately, and ends once its adapter is in `ended`.
    """

    def __init__(self, room: int, engine_dir: Path | None = None) -> None:
        """Create the server with a cache of `room` bytes of weights.

        With `engine_dir`, the model's configuration names the engine and the cache size.
        """
        super().__init__(tokens=[1], fault=None, step=0)
        self.engine_dir = engine_dir
        self.room = room
        self.ended: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.held: dict[int, int] = {}
        """Bytes by task id, in the order of upload."""
        self.in_use: Counter[int] = Counter()
        self.brought: list[int] = []
        """Task ids of the requests that had weights, in order."""

    @property
    def running(self) -> set[int]:
        """Task ids of the answers in progress."""
        return set(+self.in_use)

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        answer = await super().ModelConfig(request, context)
        answer.config.input.add(name="lora_config", data_type="TYPE_INT32")
        answer.config.input.add(name="lora_weights", data_type="TYPE_FP16")
        if self.engine_dir is not None:
            parameters = answer.config.parameters
            parameters["gpt_model_path"].string_value = str(self.engine_dir)
            parameters["lora_cache_host_memory_bytes"].string_value = str(self.room)
        return answer

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in requests:
            raw = dict(
                zip([t.name for t in request.inputs], request.raw_input_contents, strict=True)
            )
            if "stop" in raw:
                self.stopped.append(request.id)
                yield _response(request, [], final=True)
                continue
            await self.reads.wait()
            task_id = int.from_bytes(raw["lora_task_id"], "little")
            if error := self._store(task_id, raw.get("lora_weights")):
                yield pb.ModelStreamInferResponse(error_message=error)
                continue
            self.in_use[task_id] += 1
            try:
                yield _response(request, [1], final=False)
                await self.ended[task_id].wait()
            finally:
                # Free the adapter before the end is sent, so that the next request finds space.
                self.in_use[task_id] -= 1
            yield _response(request, [1], final=True)

    def _store(self, task_id: int, weights: bytes | None) -> str | None:
        """Store the weights. Return the text of an error, or None."""
        if weights is not None:
            self.brought.append(task_id)
        if task_id in self.held:
            return None
        if weights is None:
            return f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
        idle = [held for held in self.held if not self.in_use[held]]
        while sum(self.held.values()) + len(weights) > self.room:
            if not idle:
                return f"PEFT Cache is full. Could not store taskId={task_id}"
            del self.held[idle.pop(0)]
        self.held[task_id] = len(weights)
        return None
