"""Protocols: the part of an engine that its running requests use, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.stops import EarlyStop
from gateway.triton.events import AdapterUpload
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.request import InferRequest
from gateway.triton.residency import Residency
from gateway.triton.transport import Message, Metadata, ResponseStream


class OpenStream(Protocol):
    """A running request whose tokens are sent as they are generated."""

    def waits_since(self, then: float) -> bool:
        """Return True if the first response came by `then` and nothing is there to be read.

        `then` is a time of the event loop.
        """


class StreamOwner(Protocol):
    """The part of an engine that its running requests use."""

    residency: Residency
    on_upload: Callable[[AdapterUpload], None]
    has_received: bool
    """Set by a request that has received anything: the server is alive, even if it misses polls."""
    received_at: float
    """Event-loop time at which a poll last found `has_received` set, and cleared it."""
    single_responses: int
    """Number of running requests that get a single response, at the end."""
    streams: set[OpenStream]
    """The running requests that get a stream of responses."""
    draining: bool
    """True while the gateway shuts down. Abandoned requests are then reported with that reason."""

    def record_token(self) -> None:
        """Record that a request has received a token."""

    def doubt(self) -> None:
        """Record that a request failed or got no response, so the engine may be dead."""

    async def open(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """Send a request, and return its serialized responses.

        Raises GatewayError if there is no connection, TimeoutError if none is made by `by`, a time
        of the event loop.
        """

    async def open_pieces(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """Send a request like `open`, and return its responses as bytes in the pieces received."""

    def stop(self, request: InferRequest, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Send the stop request `request`, and repeat it a few times until `stopping` is over.

        `model` is the model whose request is to be stopped. Cancelling the caller does not cancel
        the stop request.
        """
