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

    Create instances inside a running event loop. Raises ValueError for an invalid endpoint, OSError
    if a certificate cannot be read.
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
        """Send one serialized ModelInferRequest on a new stream, and return the responses.

        `request` may be split into several pieces. Cancelling the stream affects no other request.
        Raises GatewayError if there is no connection.
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
        """Send a request like `infer`, and return its responses as `parse` makes them.

        `parse` is called with each serialized ModelStreamInferResponse. Raises TimeoutError if
        there is no connection by `by`, a time of the event loop.
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
        """Send a request like `stream`, and return its responses as bytes in the pieces received.

        A piece may end anywhere in a response. Each response begins with gRPC's 5-byte prefix.
        """
        pieces = [request] if isinstance(request, bytes) else request
        return await self._transport.pieces(_STREAM, pieces, metadata, by)

    async def model_ready(self, model: str) -> bool:
        """Return True if the server serves `model` now.

        Raises EngineUnreachable without a connection, TimeoutError without an answer in time.
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
        """Return the server's `inference.ModelConfig` for `model`. Raises GatewayError."""
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

        Cancelling the task ends the call. Raises GatewayError, and TimeoutError after `timeout_s`.
        """
        return await self._transport.unary(_SERVICE + "/ModelInfer", request, timeout_s, metadata)

    def disconnect(self) -> None:
        """Abort all calls in flight; the next call connects again."""
        self._transport.disconnect()

    async def close(self) -> None:
        await self._transport.close()


def parse_response(data: bytes) -> pb.ModelStreamInferResponse:
    """Parse a response. Raises EngineBroken if it is invalid."""
    return _parse(pb.ModelStreamInferResponse, data)


def _parse(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise EngineBroken("The inference server's answer cannot be read.") from error


def _transport(endpoint: Endpoint, options: ConnectionOptions) -> Transport:
    if options.transport == "http2":
        return Http2Transport(endpoint, options)
    # Import grpcio only if it is configured: it takes 8 MiB, and is only the reference transport.
    from gateway.triton.grpcio import GrpcioTransport  # noqa: PLC0415

    return GrpcioTransport(endpoint, options)
