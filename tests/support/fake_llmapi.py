"""A scripted server for the llmapi model, for behaviour that a real one does not show on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tritonclient.grpc import model_config_pb2, service_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from gateway.triton import bytes_tensor

INPUTS = {
    "BOOL": (
        *("streaming", "stop", "sampling_param_exclude_input_from_output"),
        *("return_finish_reason", "return_stop_reason", "sampling_param_return_perf_metrics"),
    ),
    "FP32": (
        *("sampling_param_temperature", "sampling_param_top_p"),
        *("sampling_param_frequency_penalty", "sampling_param_presence_penalty"),
    ),
    "INT32": ("sampling_param_max_tokens", "sampling_param_top_k"),
    "STRING": ("text_input",),
    "UINT64": ("sampling_param_seed",),
}
# LoRA inputs by dtype, which only releases with streaming have.
LORA = {"UINT64": ("lora_id",), "STRING": ("lora_name", "lora_path")}
Step = dict[str, str] | str | None
"""A step: outputs by name, the text of an error, or None if the request hangs."""


def build_outputs(text: str, finish: str = "None", **others: str) -> dict[str, str]:
    """Return outputs as the model sends them. All are strings."""
    return {"text_output": text, "finish_reason": finish, "stop_reason": "None"} | others


class FakeLlmapi(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A servicer that answers each request with `steps`. The last step is final.

    Like upstream, the servicer answers a stop request with an error and stops nothing.
    """

    def __init__(
        self,
        *steps: Step,
        streams: bool = True,
        decoupled: bool = True,
        polls_ended: str | None = None,
    ) -> None:
        self.steps = list(steps)
        self.streams = streams
        self.decoupled = decoupled
        self.polls_ended = polls_ended
        """Value in the model's configuration, or None to omit it like upstream."""
        self.ready = True
        self.max_batch_size = 0
        self.drop: tuple[str, ...] = ()
        """Inputs that are missing in the configuration."""
        self.has: tuple[str, ...] = ()
        """Additional INT32 inputs in the configuration."""
        self.of_prompt: dict[str, tuple[Step, ...]] = {}
        """Steps for particular prompts, by prompt."""
        self.requests: list[pb.ModelInferRequest] = []
        self.stopped: list[str] = []
        self.cancelled: list[str] = []

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self.ready)

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        config = model_config_pb2.ModelConfig(name=request.name, backend="python")
        config.max_batch_size = self.max_batch_size
        config.model_transaction_policy.decoupled = self.decoupled
        if self.polls_ended is not None:
            config.parameters["polls_ended_requests"].string_value = self.polls_ended
        for declared in (INPUTS, LORA) if self.streams else (INPUTS,):
            for datatype, names in declared.items():
                for name in names:
                    if name in self.drop:
                        continue
                    optional = name != "text_input"
                    config.input.add(name=name, data_type=f"TYPE_{datatype}", optional=optional)
        for name in self.has:
            config.input.add(name=name, data_type="TYPE_INT32", optional=True)
        for name in ("text_output", "finish_reason", "stop_reason"):
            config.output.add(name=name, data_type="TYPE_STRING")
        config.output.add(name="kv_cache_reused_block", data_type="TYPE_INT32")
        return pb.ModelConfigResponse(config=config)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in requests:
            if "stop" in {tensor.name for tensor in request.inputs}:
                self.stopped.append(request.id)
                yield pb.ModelStreamInferResponse(error_message="Request cancelled by client")
                continue
            self.requests.append(request)
            try:
                [prompt] = bytes_tensor.unpack(inputs_of(request)["text_input"][2])
                steps = self.of_prompt.get(prompt, self.steps)
                for number, step in enumerate(steps):
                    if step is None:
                        await asyncio.Event().wait()
                    elif isinstance(step, str):
                        yield pb.ModelStreamInferResponse(error_message=step)
                        return
                    else:
                        yield answer_to(request, step, final=number + 1 == len(steps))
            except (asyncio.CancelledError, GeneratorExit):
                self.cancelled.append(request.id)
                raise


def inputs_of(request: pb.ModelInferRequest) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and raw bytes of each input."""
    contents = zip(request.inputs, request.raw_input_contents, strict=True)
    return {each.name: (each.datatype, list(each.shape), raw) for each, raw in contents}


def answer_to(
    request: pb.ModelInferRequest, outputs: dict[str, str], *, final: bool
) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = request.model_name, request.id
    response.parameters["triton_final_response"].bool_param = final
    for name, text in outputs.items():
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(bytes_tensor.pack([text]))
    return message
