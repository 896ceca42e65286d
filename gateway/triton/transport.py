"""Interface of the transports that send calls to Triton.

There are two transports: `http2` (this project's client on asyncio) and `grpcio` (grpc.aio, the
reference for tests of `http2`). Both raise GatewayError and TimeoutError, and never grpc's own
errors.

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

# One serialized request as chunks, which are sent in this order.
Message = Sequence[bytes | memoryview]
Metadata = Mapping[str, str]
TransportName = Literal["http2", "grpcio"]

# Triton's maximum size of requests and responses. (gRPC itself would allow twice as much.)
MAX_MESSAGE_BYTES = 2**31 - 1
NO_METADATA: Metadata = {}
_TLS_SCHEME = "grpcs://"

CONNECT_TIMEOUT_S = 5.0
"""Timeout in seconds of one connection attempt, including TLS and the server's SETTINGS."""

ABANDON_GRACE_S = 2.0
MAX_ABANDONED = 1000
"""Maximum number of abandoned streams on one connection that have not ended yet.

When this number is reached, a further stream is reset as soon as it is abandoned.
"""

OnEnded = Callable[[bool], None]
"""Callback for the end of an abandoned stream.

Its argument is True if the server has ended the stream, and False if the stream was reset or the
connection was lost."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """The responses to one request, in order. Only one task may read at a time."""

    async def wait_sent(self) -> None:
        """Wait until the request is written or aborted. Its memory can then be freed."""

    async def read(self) -> T_co | None:
        """Return the next response, or None at the end of the stream.

        Raise GatewayError if the RPC fails, and CancelledError after `cancel`.
        """

    async def feed(self, take: Callable[[Sequence[bytes]], bool]) -> bool:
        """Call `take` with serialized responses until it returns False.

        Responses that arrived together are passed in one call. `take` may be called directly when
        bytes are received, which saves a task switch per response. If `take` raises an exception,
        raise the same exception. Otherwise raise the same errors as `read`.

        Return True if `take` has returned False, and False at the end of the stream.
        """

    @property
    def unread(self) -> int:
        """Number of responses that were received but not read.

        The number remains available after the stream was abandoned. A transport that cannot count
        these responses returns 0.
        """

    def cancel(self) -> None:
        """Reset the stream at once. Further calls do nothing."""

    def abandon(self, ended: OnEnded | None = None) -> None:
        """Stop reading. Let the server end the stream, or reset it after `ABANDON_GRACE_S` seconds.

        Later reads raise CancelledError, as after `cancel`. `ended` is called once, when the stream
        has ended or was reset. If `abandon` is called again, the new `ended` is ignored.

        Use this instead of `cancel` for a stream that the server is about to end: after the final
        response, or after a stop request. Triton 2.51 leaks some KiB of memory for each stream that
        is reset.
        """


class Transport(Protocol):
    """Calls to one Triton endpoint. Not thread-safe: use an instance in one event loop only."""

    async def stream(
        self,
        path: str,
        request: Message,
        parse: Callable[[bytes], T],
        metadata: Metadata,
        by: float | None = None,
    ) -> ResponseStream[T]:
        """Send one request as a new gRPC call, and return the stream of its parsed responses.

        Cancelling the call affects no other call.

        Args:
            path: path of the gRPC method.
            request: the serialized request.
            parse: called with each serialized response. The stream returns its results.
            metadata: gRPC metadata of the call.
            by: latest time for a connection, in seconds of the event loop's clock; None for no
                limit.

        Raises:
            GatewayError: connecting has failed.
            TimeoutError: the connection is not ready at the time `by`.
        """

    async def pieces(
        self, path: str, request: Message, metadata: Metadata, by: float | None = None
    ) -> ResponseStream[bytes]:
        """Send one request like `stream`, and return a stream of the received bytes.

        The bytes come in chunks as they were received, so a chunk may end within a response. Each
        response starts with gRPC's 5-byte message prefix.
        """

    async def unary(
        self, path: str, request: bytes, timeout_s: float, metadata: Metadata = NO_METADATA
    ) -> bytes:
        """Send one request, and return its only response, serialized.

        Raise TimeoutError if there is no response within `timeout_s` seconds, and GatewayError if
        the call fails.
        """

    def disconnect(self) -> None:
        """Fail all running calls and drop all connections. The next call connects again."""

    async def close(self) -> None:
        """Fail all running calls and close all connections."""


class ClientTls(NamedTuple):
    """TLS certificates of the connections to Triton, in the formats that the transports need.

    `context` is for the transport `http2`. The other attributes are PEM data for `grpcio`.
    """

    context: ssl.SSLContext
    ca: bytes | None
    cert: bytes | None
    key: bytes | None


_SHARED: WeakValueDictionary[ClientFiles, ReloadedValue[ClientTls]] = WeakValueDictionary()


def _load_client_tls(files: ClientFiles) -> ClientTls:
    """Load the certificates. Raise OSError if a file cannot be read or changes during the call."""
    context, content = files.load()
    context.set_alpn_protocols(["h2"])
    return ClientTls(context, *content)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Options of the connections to replicas.

    Attributes:
        transport: the transport to use.
        tls_ca: PEM file with the certificate authorities to trust, for ``grpcs://`` endpoints; None
            to trust the system's authorities.
        tls_cert: PEM file with the client's certificate, if the server requires one.
        tls_key: PEM file with the private key of the client's certificate.
        metadata: gRPC metadata that is sent with every call, such as an access key.
    """

    transport: TransportName = "http2"
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metadata: Metadata = field(default_factory=dict)

    def load_tls(self) -> ReloadedValue[ClientTls]:
        """Return the certificates. All transports with the same files share them.

        Raise OSError if a file cannot be read.
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
    """Address of one Triton server."""

    host: str
    port: int
    tls: bool
    name: str
    """Host name that the server's certificate must have."""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse ``host:port`` or ``grpcs://host:port``, optionally followed by ``#NAME``.

        NAME is the name that the server's certificate must have. IPv6 addresses are in brackets.
        Raise ValueError if the text is invalid.
        """
        address, _, name = text.removeprefix(_TLS_SCHEME).partition("#")
        host, colon, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16) or "/" in host:
            raise ValueError(f"{text!r} is neither host:port nor {_TLS_SCHEME}host:port")
        return cls(host, int(port), text.startswith(_TLS_SCHEME), name or host)

    @property
    def authority(self) -> str:
        """The endpoint as ``host:port``, with IPv6 addresses in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def message_bytes(request: Message) -> int:
    """Return the size of a serialized request in bytes.

    Raise ValueError if the request is longer than Triton accepts.
    """
    size = sum(memoryview(piece).nbytes for piece in request)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes is longer than Triton accepts")
    return size
