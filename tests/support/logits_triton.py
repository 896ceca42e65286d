"""A scripted engine that sends logits of generated and prompt tokens."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.support.fake_triton import FakeTriton

_ENGINE = {
    "pretrained_config": {"vocab_size": 256},
    "build_config": {"gather_context_logits": True, "gather_generation_logits": True},
}
_INPUTS = ("return_log_probs", "return_context_logits", "return_generation_logits")


class LogitsTriton(FakeTriton):
    """A fake Triton whose logits are `row(n)` for the n-th token of each answer and prompt."""

    def __init__(self, folder: Path, *, tokens: list[int], vocabulary: int = 256) -> None:
        """Create the engine. `folder` receives the engine's config.json."""
        super().__init__(tokens=tokens, fault=None, step=0)
        self.vocabulary = vocabulary
        self.prompts_answered = 0
        self._folder = folder
        (folder / "config.json").write_text(json.dumps(_ENGINE), encoding="utf-8")

    def row(self, n: int) -> npt.NDArray[np.float32]:
        """Return logits with different likeliest tokens for each n, all below 256."""
        row = np.random.default_rng(n).normal(0, 2, self.vocabulary).astype(np.float32)
        row[256:] -= 100
        return row

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        answer = await super().ModelConfig(request, context)
        for name in _INPUTS:
            answer.config.input.add(name=name, data_type=model_config_pb2.TYPE_BOOL)
        answer.config.parameters["gpt_model_path"].string_value = str(self._folder)
        return answer

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in requests:
            inputs = {tensor.name: at for at, tensor in enumerate(request.inputs)}
            if "stop" in inputs:
                self.stop(request.id)
                yield _response(request, final=True)
                continue
            self.requests.append(request)
            if "return_context_logits" in inputs:
                prompt = array("i", request.raw_input_contents[inputs["input_ids"]])
                rows = np.stack([self.row(n) for n in range(len(prompt))])
                yield _response(request, final=True, context_logits=rows[np.newaxis])
                self.prompts_answered += 1
                continue
            for n, token in enumerate(self.tokens):
                await asyncio.sleep(self.pause_s)
                logits = {}
                if "return_generation_logits" in inputs:
                    logits["generation_logits"] = self.row(n)[np.newaxis, np.newaxis, np.newaxis]
                log_probs = np.full((1, 1, n + 1), -1, np.float32)
                ids = np.array([[[token]]], np.int32)
                final = n == len(self.tokens) - 1
                yield _response(
                    request, final=final, output_ids=ids, output_log_probs=log_probs, **logits
                )


def _response(
    request: pb.ModelInferRequest, *, final: bool, **tensors: npt.NDArray[Any]
) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = request.model_name, request.id
    response.parameters["triton_final_response"].bool_param = final
    for name, values in tensors.items():
        datatype = "INT32" if values.dtype == np.int32 else "FP32"
        response.outputs.add(name=name, datatype=datatype, shape=values.shape)
        response.raw_output_contents.append(values.tobytes())
    return message
