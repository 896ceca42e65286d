"""The wire to one Triton server: unary calls and one ModelStreamInfer stream per request.

This is the narrow seam of the transport: `engine` above it knows messages, not gRPC.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.triton.failures import from_rpc

# Triton accepts up to INT32_MAX both ways; gRPC's own default of 4 MiB is too small for logits.
# Triton ends connections that ping an idle line more often than every 5 minutes, so no keepalive.
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_UNARY_TIMEOUT_S = 5.0


class ResponseStream(Protocol):
    """Responses to the one request of a stream, in order."""

    async def read(self) -> pb.ModelStreamInferResponse | None:
        """The next response, None at the end. Raises EngineUnavailable when the line breaks."""

    def cancel(self) -> None:
        """Ends the stream at once; idempotent."""


class TritonClient:
    """Connection to one Triton endpoint (host:port). Create it inside a running event loop."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # Requests are sent as bytes: LoRA weights never become a protobuf object.
        self._stream_infer: Any = self._channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=None,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )

    async def infer(self, request: bytes) -> ResponseStream:
        """Sends one serialized ModelInferRequest on a stream of its own.

        So cancelling it hits nothing else.
        """
        call = self._stream_infer()
        try:
            await call.write(request)
            await call.done_writing()
        except asyncio.InvalidStateError:
            pass  # the call has ended already; the first read says why
        except grpc.RpcError as error:
            call.cancel()
            raise from_rpc(error) from error
        except BaseException:
            call.cancel()
            raise
        return _GrpcStream(call)

    async def model_ready(self, model: str) -> bool:
        """Whether the server serves `model` now; False also when it cannot be reached.

        Raises TimeoutError when it does not answer in time.
        """
        try:
            reply = await self._stub.ModelReady(
                pb.ModelReadyRequest(name=model), timeout=_UNARY_TIMEOUT_S
            )
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            return False
        return bool(reply.ready)

    async def model_config(self, model: str) -> Any:
        """The server's `inference.ModelConfig` of `model`."""
        try:
            reply = await self._stub.ModelConfig(
                pb.ModelConfigRequest(name=model), timeout=_UNARY_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return reply.config

    async def close(self) -> None:
        await self._channel.close()


class _GrpcStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> pb.ModelStreamInferResponse | None:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        return None if message is grpc.aio.EOF else message

    def cancel(self) -> None:
        self._call.cancel()
