"""A TLS proxy for another server, which records the clients' certificates."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from cryptography import x509

from tests.support.authority import Authority

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TlsProxy:
    """A proxy. `serials` has the serial number of each connection's client certificate."""

    def __init__(
        self,
        authority: Authority,
        pair: tuple[Path, Path],
        alpn: Sequence[str] = (),
        *,
        mutual: bool = True,
    ) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
        context.load_cert_chain(*pair)
        context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
        if alpn:
            context.set_alpn_protocols(list(alpn))
        self.context = context
        self.serials: list[int] = []
        self.port = 0

    @contextlib.asynccontextmanager
    async def serving(self, connect: Callable[[], Awaitable[Streams]]) -> AsyncIterator[TlsProxy]:
        """Run the proxy. `connect` opens a connection to the server behind it."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            running.add(asyncio.current_task())
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if shown is not None:
                self.serials.append(x509.load_der_x509_certificate(shown).serial_number)
            behind = await connect()
            try:
                await asyncio.gather(_copy(reader, behind[1]), _copy(behind[0], writer))
            finally:
                for each in (writer, behind[1]):
                    each.transport.abort()

        running: set[asyncio.Task[None] | None] = set()
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=self.context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in filter(None, running):
                task.cancel()
            await asyncio.gather(*filter(None, running), return_exceptions=True)


def serial_of(cert: Path) -> int:
    return x509.load_pem_x509_certificate(cert.read_bytes()).serial_number


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
