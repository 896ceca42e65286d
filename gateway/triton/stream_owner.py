"""The interface of an engine to the streams of its generations."""

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
    """A stream whose tokens come as they are made."""

    def waits_since(self, then: float) -> bool:
        """Return True if the stream had started by `then` and nothing waits to be read."""


class StreamOwner(Protocol):
    """The interface of an engine to its streams."""

    residency: Residency
    on_upload: Callable[[AdapterUpload], None]
    has_received: bool
    """Set by a stream that has received anything: the server is alive, even if it misses polls."""
    received_at: float
    """Time at which `has_received` was last found set and cleared, in the event loop's time."""
    single_responses: int
    """Number of running requests whose first response is the last."""
    streams: set[OpenStream]
    """The other running requests."""
    draining: bool
    """True while the gateway shuts down: requests abandoned then are reported so."""

    def record_token(self) -> None:
        """Record that a request has received a token."""

    def doubt(self) -> None:
        """Report a failed or unstarted request, which may show that the engine is dead."""

    async def open(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """Send a request.

        Raises GatewayError if there is no connection, TimeoutError if none is made by `by`, a time
        of the event loop.
        """

    async def open_pieces(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """Send a request like `open`; the responses are bytes in the pieces received."""

    def stop(self, request: InferRequest, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Send a stop request to `model` and repeat it until the request ends.

        The caller's cancellation does not affect it.
        """
