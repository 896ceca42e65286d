"""The interface between calls to Triton and the transport that carries them.

Two transports implement it: `http2` (our own, on asyncio) and `grpcio` (grpc.aio, the reference
that the first is tested against). Both raise GatewayErrors and TimeoutError, nothing of gRPC.

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

# One request message, in its pieces; sent in order, never joined.
Message = Sequence[bytes | memoryview]
Metadata = Mapping[str, str]
TransportName = Literal["http2", "grpcio"]

# Triton's own limit both ways. gRPC's length prefix could express twice that.
MAX_MESSAGE_BYTES = 2**31 - 1
NO_METADATA: Metadata = {}
_TLS_SCHEME = "grpcs://"

CONNECT_TIMEOUT_S = 5.0
"""Timeout of one connection attempt: TCP, TLS and the server's settings."""

ABANDON_GRACE_S = 2.0
MAX_ABANDONED = 1000
"""Maximum number of abandoned streams of one connection that have not ended; a further one is reset
at once."""

OnEnded = Callable[[bool], None]
"""Called when an abandoned stream is over. True if the server has ended it; False if it was reset
or the connection was lost."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """Responses to the one request of a stream, in order. One reader at a time."""

    async def wait_sent(self) -> None:
        """Return when the transport no longer holds the request: it is written, or was aborted."""

    async def read(self) -> T_co | None:
        """Return the next response, or None at the end.

        Raises GatewayError if the RPC fails, and CancelledError after `cancel`.
        """

    async def feed(self, take: Callable[[Sequence[bytes]], bool]) -> bool:
        """Give `take` the serialized responses while it returns True.

        Responses that arrived together are given together. `take` may be called where the bytes are
        received, so that a response costs no task switch; its errors are raised here.

        Returns False at the end of the stream, True when `take` has returned False. Raises like
        `read`.
        """

    @property
    def unread(self) -> int:
        """Return how many responses have arrived unread, also after the stream was abandoned.

        0 if the transport does not know.
        """

    def cancel(self) -> None:
        """End the stream at once; idempotent."""

    def abandon(self, ended: OnEnded | None = None) -> None:
        """Stop reading, and let the server end the stream itself within `ABANDON_GRACE_S`.

        A reader sees it like `cancel`. `ended` is called once, at the end of the grace at the
        latest; of several calls that of the first one.

        Use it for a stream that the server is about to end: after its final response, or once it
        was sent a stop request. Triton (2.51) leaks some KiB for each stream that is reset before
        its trailers.
        """


class Transport(Protocol):
    """Calls to one Triton endpoint. Belongs to one event loop."""

    async def stream(
        self,
        path: str,
        request: Message,
        parse: Callable[[bytes], T],
        metadata: Metadata,
        by: float | None = None,
    ) -> ResponseStream[T]:
        """Start a call of its own with one request, so that cancelling it affects no other.

        Raises GatewayError if there is no connection, TimeoutError if none is made by `by`, a time
        of the event loop.
        """

    async def pieces(
        self, path: str, request: Message, metadata: Metadata, by: float | None = None
    ) -> ResponseStream[bytes]:
        """Start a call like `stream`; the responses are fed as bytes in the pieces received.

        Each response begins with gRPC's prefix.
        """

    async def unary(
        self, path: str, request: bytes, timeout_s: float, metadata: Metadata = NO_METADATA
    ) -> bytes:
        """Return the reply. Raises TimeoutError if there is none in time, GatewayError if the call
        fails."""

    def disconnect(self) -> None:
        """Fail all running calls and drop the connections; the next call makes a new one."""

    async def close(self) -> None:
        """Fail all running calls and close the connections."""


class ClientTls(NamedTuple):
    """Certificates of connections: a context for HTTP/2, and the content of the same files for
    grpc.aio."""

    context: ssl.SSLContext
    ca: bytes | None
    cert: bytes | None
    key: bytes | None


_SHARED: WeakValueDictionary[ClientFiles, ReloadedValue[ClientTls]] = WeakValueDictionary()


def _load_client_tls(files: ClientFiles) -> ClientTls:
    """Load the files. Raises OSError, also if they change while they are read."""
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
        """Return the certificates that all transports with these files share. Raises OSError."""
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
    """Return the size of one request. Raises ValueError if it is too long for Triton."""
    size = sum(memoryview(piece).nbytes for piece in request)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes is longer than Triton accepts")
    return size
