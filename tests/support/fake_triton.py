"""A scripted gRPC server that breaks at a chosen step, as no real Triton does on demand."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

Fault = Literal["error", "abort", "truncate", "stall", "slow", "drop", "duplicate"]

INPUTS = {
    "INT32": (
        *("input_ids", "input_lengths", "request_output_len", "end_id", "pad_id"),
        *("stop_words_list", "runtime_top_k"),
    ),
    "FP32": ("runtime_top_p", "temperature"),
    "UINT64": ("random_seed", "lora_task_id"),
    "BOOL": ("stop", "streaming"),
    "STRING": ("guided_decoding_guide_type", "guided_decoding_guide"),
}


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers each request with `tokens` ids, one per message; at message `step` comes `fault`."""

    def __init__(self, *, tokens: list[int], fault: Fault | None, step: int) -> None:
        self.tokens = tokens
        self.fault = fault
        self.step = step
        self.reached = 0
        """How often the fault has happened."""
        self.released = asyncio.Event()
        """What the fault `slow` waits for."""
        self.error = "Maximum queue size of 1 has been reached, please try again later"
        self.pause_s = 0.0
        """Before each token."""
        self.reads = asyncio.Event()
        """Whether it reads requests; what comes before stays in the connection's windows."""
        self.reads.set()
        self.deaf = False
        """Whether it answers requests, but not whether it serves its model."""
        self.unanswered = 0
        """How often it was asked that meanwhile."""
        self.given = 0
        """Tokens, to all requests."""
        self.freezes_behind: int | None = None
        """So many tokens, and one more answer to that question, are the last that it says."""
        self.reused: int | None = None
        """Blocks of a prompt that it says it had; None if it tells nothing of its cache."""
        self.stopped: list[str] = []
        self.requests: list[pb.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []
        """Of each call with one of `requests`."""

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        if self.deaf:
            self.unanswered += 1
            await asyncio.Event().wait()
        self.deaf = self.freezes_behind is not None and self.given >= self.freezes_behind
        return pb.ModelReadyResponse(ready=True)

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        config = model_config_pb2.ModelConfig(name=request.name)
        config.model_transaction_policy.decoupled = True
        config.parameters["guided_decoding_backend"].string_value = "xgrammar"
        for datatype, names in INPUTS.items():
            for name in names:
                config.input.add(name=name, data_type=f"TYPE_{datatype}")
        config.output.add(name="sequence_length")
        if self.reused is not None:
            config.input.add(name="return_kv_cache_reuse_stats", data_type="TYPE_BOOL")
        return pb.ModelConfigResponse(config=config)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        await self.reads.wait()
        async for request in requests:
            if any(tensor.name == "stop" for tensor in request.inputs):
                self.stopped.append(request.id)
                yield _response(request, [], final=True)
                continue
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            last = len(self.tokens) - 1
            for n, token in enumerate(self.tokens):
                await asyncio.sleep(self.pause_s)
                if self.deaf and self.freezes_behind is not None:
                    await asyncio.Event().wait()
                self.given += 1
                self.reached += n == self.step
                reused = self.reused
                if n == self.step and self.fault == "slow":
                    await self.released.wait()
                elif n == self.step and self.fault == "drop":
                    continue
                elif n == self.step and self.fault == "duplicate":
                    yield _response(request, [token], final=n == last, reused=reused)
                elif n == self.step and self.fault is not None:
                    if self.fault == "error":
                        yield pb.ModelStreamInferResponse(error_message=self.error)
                    elif self.fault == "abort":
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
                    elif self.fault == "stall":
                        await asyncio.Event().wait()
                    return
                yield _response(request, [token], final=n == last, reused=reused)


def _response(
    request: pb.ModelInferRequest, ids: list[int], *, final: bool, reused: int | None = None
) -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = request.model_name, request.id
    response.parameters["triton_final_response"].bool_param = final
    response.outputs.add(name="output_ids", datatype="INT32", shape=[1, 1, len(ids)])
    response.raw_output_contents.append(array("i", ids).tobytes())
    response.outputs.add(name="sequence_length", datatype="INT32", shape=[1, 1])
    response.raw_output_contents.append(array("i", [len(ids)]).tobytes())
    if reused is not None:
        response.outputs.add(name="kv_cache_reused_blocks", datatype="INT32", shape=[1, 1])
        response.raw_output_contents.append(array("i", [reused]).tobytes())
    return message


@contextlib.asynccontextmanager
async def serving(servicer: Any, endpoint: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serves while the context is open; yields the endpoint, a free port by default."""
    # Else its windows grow, and take a megabyte that nobody reads.
    server = grpc.aio.server(options=[("grpc.http2.bdp_probe", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(endpoint)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
