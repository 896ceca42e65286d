"""What the stream of one generation needs of the engine that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.stops import EarlyStop
from gateway.triton.events import ColdSend
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.request import Request
from gateway.triton.residency import Residency
from gateway.triton.transport import Message, Metadata, ResponseStream


class OpenStream(Protocol):
    """One whose tokens come as they are made."""

    def waits_since(self, then: float) -> bool:
        """Return True if the stream had begun by `then` and nothing waits to be read."""


class StreamOwner(Protocol):
    """The engine, as its streams see it."""

    residency: Residency
    on_cold_send: Callable[[ColdSend], None]
    heard: bool
    """Set by a stream that has received anything: the server is there, if slow to be asked."""
    heard_at: float
    """When that was last found set, and cleared, in the event loop's time."""
    whole_answers: int
    """How many requests are under way whose first response is the last."""
    streams: set[OpenStream]
    """The other requests under way."""
    draining: bool
    """Whether the gateway is ending, so that what is left early is left for that."""

    def works(self) -> None:
        """A request has been given a token."""

    def doubt(self) -> None:
        """A request failed, or was not begun, as those of an engine that is dead would."""

    async def open(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """Sends a request. Raises GatewayError when there is no connection, TimeoutError when none
        is made `by` then, a time of the event loop."""

    async def open_pieces(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        """As `open`, with the bytes of the responses in the pieces that they come in."""

    def stop(self, request: Request, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Sends a stop request for what `model` was given, out of reach of the caller's
        cancellation; and again if that does not end."""
