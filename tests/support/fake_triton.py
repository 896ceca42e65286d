"""A scripted gRPC server that fails at a chosen step, which no real Triton does on demand."""

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
    """A servicer that answers with `tokens`, one per message, or with `fault` at message `step`."""

    def __init__(self, *, tokens: list[int], fault: Fault | None, step: int) -> None:
        self.tokens = tokens
        self.fault = fault
        self.step = step
        self.reached = 0
        """Number of times the fault has occurred."""
        self.released = asyncio.Event()
        """Event for which the fault `slow` waits."""
        self.error = "Maximum queue size of 1 has been reached, please try again later"
        self.pause_s = 0.0
        """Seconds before each token."""
        self.reads = asyncio.Event()
        """Set while requests are read. Otherwise their data stays in the HTTP/2 window."""
        self.reads.set()
        self.deaf = False
        """True if requests are answered but readiness calls are not."""
        self.unanswered = 0
        """Number of readiness calls left unanswered."""
        self.given = 0
        """Number of tokens sent in all requests."""
        self.freezes_behind: int | None = None
        """Number of tokens after which nothing more is sent, except one readiness answer."""
        self.reused: int | None = None
        """Number of prompt blocks reported as reused, or None to report none."""
        self.stops: list[str] = []
        """Ids of stop requests, including repeated ones."""
        self.forgets = 0
        """Number of first stops per request to ignore, as if the request id were not known yet."""
        self._ends: dict[str, asyncio.Event] = {}
        self.requests: list[pb.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []
        """Metadata of each call, in the order of `requests`."""

    @property
    def stopped(self) -> list[str]:
        """Ids in `stops` without repetitions, since the gateway repeats stops on a busy machine."""
        return list(dict.fromkeys(self.stops))

    @property
    def running(self) -> set[str]:
        """Ids of requests that have started and not ended."""
        return {each for each, ends in self._ends.items() if not ends.is_set()}

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
                self.stop(request.id)
                yield _response(request, [], final=True)
                continue
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            ends = self._ends[request.id] = asyncio.Event()
            try:
                async for response in self._answer(request, context, ends):
                    yield response
            finally:
                self.left(request.id, ends)

    def stop(self, request_id: str) -> None:
        """Handle a stop request for this id."""
        self.stops.append(request_id)
        ends = self._ends.get(request_id)
        if ends is not None and self.stops.count(request_id) > self.forgets:
            ends.set()

    def left(self, request_id: str, ends: asyncio.Event) -> None:
        """Handle the end or the reset of a request's stream."""
        if self._ends.get(request_id) is ends:
            del self._ends[request_id]

    async def _answer(
        self, request: pb.ModelInferRequest, context: Any, ends: asyncio.Event
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Send the answer until `ends` is set."""
        last = len(self.tokens) - 1
        for n, token in enumerate(self.tokens):
            await asyncio.sleep(self.pause_s)
            if self.deaf and self.freezes_behind is not None:
                await asyncio.Event().wait()
            self.given += 1
            self.reached += n == self.step
            reused = self.reused
            if n == self.step and self.fault == "slow":
                await _either(self.released, ends)
            elif n == self.step and self.fault == "drop":
                continue
            elif n == self.step and self.fault == "duplicate":
                yield _response(request, [token], final=n == last, reused=reused)
            elif n == self.step and self.fault == "stall":
                await ends.wait()
            elif n == self.step and self.fault is not None:
                if self.fault == "error":
                    yield pb.ModelStreamInferResponse(error_message=self.error)
                elif self.fault == "abort":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
                return
            if ends.is_set():
                yield _response(request, [], final=True)
                return
            yield _response(request, [token], final=n == last, reused=reused)


async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
    """Return when either event is set."""
    waiting = [asyncio.create_task(event.wait()) for event in (first, second)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


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
    """Serve while the context is open. Yield the endpoint, on a free port by default."""
    # Without BDP probes, the windows do not grow to a megabyte of unread data.
    server = grpc.aio.server(options=[("grpc.http2.bdp_probe", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(endpoint)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
