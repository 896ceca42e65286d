"""The interface between calls to Triton and the transport that carries them.

Two transports implement it: `http2` (our own, on asyncio) and `grpcio` (grpc.aio, the reference
that `http2` is tested against). Both raise GatewayError and TimeoutError, and never gRPC's errors.

See decisions 006 and 052 in docs/decisions.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from certificates.contexts import ClientFiles
from certificates.reloading import ReloadedValue

# One request message, split into pieces that are sent in this order.
Message = Sequence[bytes | memoryview]
Metadata = Mapping[str, str]
TransportName = Literal["http2", "grpcio"]

# Triton's limit for requests and responses. gRPC's length prefix could express twice as much.
MAX_MESSAGE_BYTES = 2**31 - 1
NO_METADATA: Metadata = {}
_TLS_SCHEME = "grpcs://"

CONNECT_TIMEOUT_S = 5.0
"""Timeout of one connection attempt: TCP, TLS and the server's settings."""

ABANDON_GRACE_S = 2.0
MAX_ABANDONED = 1000
"""Maximum number of abandoned streams of one connection that have not ended yet. Above it, a stream
is reset as soon as it is abandoned."""

OnEnded = Callable[[bool], None]
"""Callback for the end of an abandoned stream. Its argument is True if the server has ended the
stream, False if the stream was reset or the connection lost."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """The responses to one request, in order. Only one task may read at a time."""

    async def wait_sent(self) -> None:
        """Return when the request is written or aborted, so the transport no longer holds it."""

    async def read(self) -> T_co | None:
        """Return the next response, or None at the end.

        Raises GatewayError if the RPC fails, and CancelledError after `cancel`.
        """

    async def feed(self, take: Callable[[Sequence[bytes]], bool]) -> bool:
        """Give `take` the serialized responses while it returns True.

        Responses that arrived together are given together. `take` may be called directly when bytes
        are received, which saves a task switch per response. Errors of `take` are raised here.

        Returns False at the end of the stream, True when `take` has returned False. Raises like
        `read`.
        """

    @property
    def unread(self) -> int:
        """Return the number of responses that have arrived and were not read.

        The number stays available after the stream was abandoned. It is 0 if the transport does not
        know it.
        """

    def cancel(self) -> None:
        """End the stream at once; idempotent."""

    def abandon(self, ended: OnEnded | None = None) -> None:
        """Stop reading, and let the server end the stream itself within `ABANDON_GRACE_S`.

        A read raises CancelledError, as after `cancel`. `ended` is called once, when the stream has
        ended or at the end of the grace. Only the first call's `ended` is used.

        Use it for a stream that the server is about to end: after its final response, or once it
        was sent a stop request. Triton (2.51) leaks some KiB for each stream that is reset before
        its trailers.
        """


class Transport(Protocol):
    """Calls to one Triton endpoint. Use each instance in one event loop only."""

    async def stream(
        self,
        path: str,
        request: Message,
        parse: Callable[[bytes], T],
        metadata: Metadata,
        by: float | None = None,
    ) -> ResponseStream[T]:
        """Send one request as a call of its own, and return its responses as `parse` makes them.

        Cancelling the call affects no other. Raises GatewayError if there is no connection,
        TimeoutError if no connection is made by `by`, a time of the event loop.
        """

    async def pieces(
        self, path: str, request: Message, metadata: Metadata, by: float | None = None
    ) -> ResponseStream[bytes]:
        """Start a call like `stream`, and return its responses as bytes in the pieces received.

        A piece may end anywhere in a response. Each response begins with gRPC's 5-byte prefix.
        """

    async def unary(
        self, path: str, request: bytes, timeout_s: float, metadata: Metadata = NO_METADATA
    ) -> bytes:
        """Send one request and return its only response, serialized.

        Raises TimeoutError if there is no response in time, GatewayError if the call fails.
        """

    def disconnect(self) -> None:
        """Fail all running calls and drop the connections. The next call connects again."""

    async def close(self) -> None:
        """Fail all running calls and close the connections."""


class ClientTls(NamedTuple):
    """Certificates for connections: a context for HTTP/2, and the files' content for grpc.aio."""

    context: ssl.SSLContext
    ca: bytes | None
    cert: bytes | None
    key: bytes | None


_SHARED: WeakValueDictionary[ClientFiles, ReloadedValue[ClientTls]] = WeakValueDictionary()


def _load_client_tls(files: ClientFiles) -> ClientTls:
    """Load the certificates. Raises OSError, also if a file changes while it is read."""
    context, content = files.load()
    context.set_alpn_protocols(["h2"])
    return ClientTls(context, *content)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Options of the connections to replicas.

    `tls_*` are PEM files for ``grpcs://`` endpoints: the authorities to trust (the system's if
    None), and the client's own certificate with its key if the server asks for one. `metadata` is
    sent with every call, such as the key of a restricted protocol.
    """

    transport: TransportName = "http2"
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metadata: Metadata = field(default_factory=dict)

    def load_tls(self) -> ReloadedValue[ClientTls]:
        """Return the certificates, which all transports with the same files share.

        Raises OSError if a file cannot be read.
        """
        files = ClientFiles(self.tls_ca, self.tls_cert, self.tls_key)
        found = _SHARED.get(files)
        if found is None:
            name = "certificates of the connections to Triton"
            found = ReloadedValue(name, files.paths, partial(_load_client_tls, files))
            _SHARED[files] = found
        return found


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one Triton."""

    host: str
    port: int
    tls: bool
    name: str
    """The name that the server's certificate must be for."""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse ``host:port`` or ``grpcs://host:port``; IPv6 in brackets. Raises ValueError.

        After ``#`` there may be the name that the server's certificate is for.
        """
        address, _, name = text.removeprefix(_TLS_SCHEME).partition("#")
        host, colon, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16) or "/" in host:
            raise ValueError(f"{text!r} is neither host:port nor {_TLS_SCHEME}host:port")
        return cls(host, int(port), text.startswith(_TLS_SCHEME), name or host)

    @property
    def authority(self) -> str:
        """Return ``host:port``, as HTTP/2 and grpcio take it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def message_bytes(request: Message) -> int:
    """Return the size of one request in bytes. Raises ValueError if it is too long for Triton."""
    size = sum(memoryview(piece).nbytes for piece in request)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes is longer than Triton accepts")
    return size
