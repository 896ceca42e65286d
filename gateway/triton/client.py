"""Calls to one Triton server: unary calls, and one ModelStreamInfer stream per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from gateway.errors import EngineBroken, EngineUnavailable, EngineUnreachable, GatewayError
from gateway.triton.http2.channel import Http2Transport
from gateway.triton.protobuf import pb
from gateway.triton.transport import (
    ConnectionOptions,
    Endpoint,
    Metadata,
    ResponseStream,
    Transport,
)

Responses = ResponseStream[pb.ModelStreamInferResponse]

_SERVICE = "/inference.GRPCInferenceService"
_STREAM = _SERVICE + "/ModelStreamInfer"
_UNARY_TIMEOUT_S = 5.0
_PLAIN = ConnectionOptions()
_NO_METADATA: Metadata = {}

T = TypeVar("T")


class TritonClient:
    """Connection to one Triton endpoint: ``host:port``, or ``grpcs://host:port`` for TLS.

    Create instances in a running event loop. The constructor raises ValueError for an invalid
    endpoint, and OSError if a certificate cannot be read.
    """

    def __init__(self, endpoint: str, options: ConnectionOptions = _PLAIN) -> None:
        self.endpoint = endpoint
        self._transport = _transport(Endpoint.parse(endpoint), options)

    async def infer(
        self,
        request: bytes | Sequence[bytes | memoryview],
        *,
        metadata: Metadata = _NO_METADATA,
    ) -> Responses:
        """Send one serialized ModelInferRequest on a new gRPC stream. Return its response stream.

        `request` may be a sequence of chunks, which are sent one after the other. Cancelling the
        stream affects no other request. Raise GatewayError if there is no connection.
        """
        return await self.stream(request, parse_response, metadata=metadata)

    async def stream(
        self,
        request: bytes | Sequence[bytes | memoryview],
        parse: Callable[[bytes], T],
        *,
        metadata: Metadata = _NO_METADATA,
        by: float | None = None,
    ) -> ResponseStream[T]:
        """Send one serialized ModelInferRequest. Return a stream of parsed responses.

        `parse` converts each serialized ModelStreamInferResponse to the object that the stream
        returns. Raise TimeoutError if the connection is not ready at the time `by`, in seconds of
        the event loop's clock. Otherwise, this method behaves like `infer`.
        """
        pieces = [request] if isinstance(request, bytes) else request
        return await self._transport.stream(_STREAM, pieces, parse, metadata, by)

    async def pieces(
        self,
        request: bytes | Sequence[bytes | memoryview],
        *,
        metadata: Metadata = _NO_METADATA,
        by: float | None = None,
    ) -> ResponseStream[bytes]:
        """Send one serialized ModelInferRequest. Return a stream of the received bytes.

        Each read returns the bytes that arrived together, so a chunk may end in the middle of a
        response. Each response starts with gRPC's 5-byte message prefix. Otherwise, this method
        behaves like `stream`.
        """
        pieces = [request] if isinstance(request, bytes) else request
        return await self._transport.pieces(_STREAM, pieces, metadata, by)

    async def model_ready(self, model: str) -> bool:
        """Return True if `model` is loaded on the server and ready for requests.

        Raise EngineUnreachable if there is no connection. Raise TimeoutError if the server does not
        answer within `_UNARY_TIMEOUT_S` seconds.
        """
        request = pb.ModelReadyRequest(name=model).SerializeToString()
        try:
            reply = await self._transport.unary(_SERVICE + "/ModelReady", request, _UNARY_TIMEOUT_S)
        except EngineUnreachable:
            raise
        except GatewayError:
            return False
        return bool(_parse(pb.ModelReadyResponse, reply).ready)

    async def model_config(self, model: str) -> Any:
        """Return the `inference.ModelConfig` message of `model`. Raise GatewayError on failure."""
        request = pb.ModelConfigRequest(name=model).SerializeToString()
        path = _SERVICE + "/ModelConfig"
        try:
            reply = await self._transport.unary(path, request, _UNARY_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineUnavailable("The inference server did not answer in time.") from error
        return _parse(pb.ModelConfigResponse, reply).config

    async def infer_once(
        self, request: bytes, timeout_s: float, *, metadata: Metadata = _NO_METADATA
    ) -> bytes:
        """Send a serialized ModelInferRequest, and return the serialized ModelInferResponse.

        Cancelling the task ends the call. Raise GatewayError on failure, and TimeoutError after
        `timeout_s` seconds.
        """
        return await self._transport.unary(_SERVICE + "/ModelInfer", request, timeout_s, metadata)

    def disconnect(self) -> None:
        """Abort all calls in flight. The next call opens a new connection."""
        self._transport.disconnect()

    async def close(self) -> None:
        await self._transport.close()


def parse_response(data: bytes) -> pb.ModelStreamInferResponse:
    """Parse a serialized ModelStreamInferResponse. Raise EngineBroken if it is invalid."""
    return _parse(pb.ModelStreamInferResponse, data)


def _parse(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise EngineBroken("The inference server's answer cannot be read.") from error


def _transport(endpoint: Endpoint, options: ConnectionOptions) -> Transport:
    if options.transport == "http2":
        return Http2Transport(endpoint, options)
    # Import grpcio only if it is configured, because it takes 8 MiB of memory.
    from gateway.triton.grpcio import GrpcioTransport  # noqa: PLC0415

    return GrpcioTransport(endpoint, options)
