"""The seam between what Triton is asked and the wire that carries it.

Two transports stand behind it: `http2` (our own, on asyncio) and `grpcio` (grpc.aio, the reference
that the first is tested against). Both raise GatewayErrors and TimeoutError, nothing of gRPC.
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

# One request message, in the pieces that it consists of; sent in order, never joined.
Message = Sequence[bytes | memoryview]
Metadata = Mapping[str, str]
TransportName = Literal["http2", "grpcio"]

# Triton's own limit both ways. gRPC's length prefix could say twice that.
MAX_MESSAGE_BYTES = 2**31 - 1
NO_METADATA: Metadata = {}
_TLS_SCHEME = "grpcs://"

CONNECT_TIMEOUT_S = 5.0
"""For one attempt: TCP, TLS and the server's settings."""

ABANDON_GRACE_S = 2.0
MAX_ABANDONED = 1000
"""Streams of one connection that were left and have not ended; one more is reset at once."""

OnEnded = Callable[[bool], None]
"""Told that a stream which was left is over, and whether the server has ended it: else it was
reset, or the connection was lost."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """Responses to the one request of a stream, in order. One reader at a time."""

    async def wait_sent(self) -> None:
        """Returns when nothing here holds the request any more: it is written, or was given up."""

    async def read(self) -> T_co | None:
        """The next response, None at the end.

        Raises GatewayError when the RPC fails, and CancelledError after `cancel`.
        """

    async def feed(self, take: Callable[[Sequence[bytes]], bool]) -> bool:
        """Gives `take` the responses, serialized, while it returns True.

        Those that came together are given together. `take` may be called from wherever the bytes
        are received, so that a response costs no task switch; what it raises is raised here.
        Returns False at the end of the stream, True when `take` wants no more. Raises as `read`
        does.
        """

    @property
    def unread(self) -> int:
        """How many responses have come without being read, also of a stream that was left since.

        0 where the transport does not know.
        """

    def cancel(self) -> None:
        """Ends the stream at once; idempotent."""

    def abandon(self, ended: OnEnded | None = None) -> None:
        """As `cancel` to whoever reads; the server has `LEFT_GRACE_S` to end the stream itself.

        `ended` is told once, at the latest then; of several calls that of the first one.

        For a stream that it is about to end: behind its final response, or once it is told to stop.
        Triton (2.51) keeps some KiB for ever of each stream that is reset before its trailers.
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
        """Starts a call of its own with one request: cancelling it hits nothing else.

        Raises GatewayError when there is no connection, TimeoutError when none is made `by` then, a
        time of the event loop.
        """

    async def pieces(
        self, path: str, request: Message, metadata: Metadata, by: float | None = None
    ) -> ResponseStream[bytes]:
        """As `stream`; what is fed are the bytes of responses, in the pieces that they come in.

        Each response begins with gRPC's prefix.
        """

    async def unary(
        self, path: str, request: bytes, timeout_s: float, metadata: Metadata = NO_METADATA
    ) -> bytes:
        """Raises TimeoutError when there is no answer in time, GatewayError when it fails."""

    def disconnect(self) -> None:
        """Fails what still runs and drops the connections; the next call makes a new one."""

    async def close(self) -> None:
        """Fails what still runs and closes the connections."""


class ClientTls(NamedTuple):
    """Certificates of connections: a context for HTTP/2 as gRPC wants it, and for grpc.aio the
    content of its files. Both are of the same files."""

    context: ssl.SSLContext
    ca: bytes | None
    cert: bytes | None
    key: bytes | None


_SHARED: WeakValueDictionary[ClientFiles, ReloadedValue[ClientTls]] = WeakValueDictionary()


def _load_client_tls(files: ClientFiles) -> ClientTls:
    """Raises OSError, also where the files change meanwhile."""
    context, content = files.load()
    context.set_alpn_protocols(["h2"])
    return ClientTls(context, *content)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How replicas are reached.

    `tls_*` are PEM files for ``grpcs://`` endpoints: the authorities to trust (the system's when
    None), and the client's own certificate with its key where the server asks for one.
    `metadata` goes with every call, such as the key of a restricted protocol.
    """

    transport: TransportName = "http2"
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metadata: Metadata = field(default_factory=dict)

    def load_tls(self) -> ReloadedValue[ClientTls]:
        """Return what all transports with these files share. Raises OSError."""
        files = ClientFiles(self.tls_ca, self.tls_cert, self.tls_key)
        found = _SHARED.get(files)
        if found is None:
            name = "certificates of the connections to Triton"
            found = ReloadedValue(name, files.given, partial(_load_client_tls, files))
            _SHARED[files] = found
        return found


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one Triton listens."""

    host: str
    port: int
    tls: bool
    name: str
    """What the certificate must be for."""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """From ``host:port`` or ``grpcs://host:port``; IPv6 in brackets. Raises ValueError.

        Behind ``#`` there may be the name that the server's certificate is for.
        """
        address, _, name = text.removeprefix(_TLS_SCHEME).partition("#")
        host, colon, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16) or "/" in host:
            raise ValueError(f"{text!r} is neither host:port nor {_TLS_SCHEME}host:port")
        return cls(host, int(port), text.startswith(_TLS_SCHEME), name or host)

    @property
    def authority(self) -> str:
        """``host:port``, as HTTP/2 and grpcio take it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def message_bytes(request: Message) -> int:
    """Size of one request. Raises ValueError when it is too long for Triton."""
    size = sum(memoryview(piece).nbytes for piece in request)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes is longer than Triton accepts")
    return size
