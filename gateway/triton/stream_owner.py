"""Protocols of an engine for its requests (`StreamOwner`) and of a request for its engine."""

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
    """Methods of a running streaming request that its engine uses."""

    def waits_since(self, then: float) -> bool:
        """Return True if the first response came before `then`, and no response is unread now.

        Such a stream waits for its next response. Return False after the final response. `then` is
        in seconds of the event loop's clock.
        """


class StreamOwner(Protocol):
    """Attributes and methods of an engine that its running requests use."""

    residency: Residency
    on_upload: Callable[[AdapterUpload], None]
    has_received: bool
    """True if a request has got a response since the last poll began. Requests set this flag."""
    received_at: float
    """Time at which a poll last found `has_received` True, in seconds of the event loop's clock."""
    single_responses: int
    """Number of running requests that get a single response at their end."""
    streams: set[OpenStream]
    """The running requests that get a stream of responses."""
    draining: bool
    """True while the gateway shuts down. Requests are then aborted with the reason "shutdown"."""

    def record_token(self) -> None:
        """Record that a request has received a token."""

    def doubt(self) -> None:
        """Record that the engine may be dead: a request failed or got no response."""

    async def open(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """Send a request, and return a stream of its serialized responses.

        Raise GatewayError if connecting fails. Raise TimeoutError if the connection is not ready
        at the time `by`, in seconds of the event loop's clock.
        """

    async def open_pieces(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """Send a request like `open`, and return a stream of the received bytes in chunks."""

    def stop(self, request: InferRequest, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Send a stop request. Repeat it until the stopped request has ended, at most a few times.

        Send only one stop request to an llmapi model. `request` is the stop request, and `stopping`
        reports the end of the stopped request. `model` has the capabilities of the model that runs
        this request. Cancelling the caller does not cancel the stop request.
        """
