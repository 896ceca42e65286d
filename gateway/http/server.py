"""uvicorn's server with this gateway's listening sockets, connection checks and shutdown.

`UNDOCUMENTED` lists the uvicorn attributes used here that its documentation does not promise.

See decision 036 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from uvicorn.server import ServerState

from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings
from gateway.http.backlog import Backlog
from gateway.http.connections import Connections
from gateway.http.protocol import BuildErrorResponse, ConnectionLimits, HttpProtocol
from gateway.http.start_gate import Door, StartGate
from gateway.http.tls import load_server_context
from gateway.http.workers import STOP_NOW_SIGNAL, Worker
from gateway.scheduling.start_queue import StartQueue

log = logging.getLogger(__name__)

UNDOCUMENTED: Mapping[type, tuple[str, ...]] = {
    uvicorn.Server: (
        *("startup", "on_tick", "shutdown", "handle_exit"),
        *("config", "server_state", "lifespan", "servers", "started", "should_exit", "force_exit"),
    ),
    uvicorn.Config: ("ssl",),
    ServerState: ("connections",),
}

_TICK_S = 0.1


class Application(Protocol):
    """The served application, and its interface to the server."""

    @property
    def asgi(self) -> Callable[..., Any]:
        """The ASGI application."""

    @property
    def build_error_response(self) -> BuildErrorResponse:
        """The builder of errors that a connection answers itself."""

    def set_admin_port(self, admin_port: int) -> None:
        """Record the port for admins, which is known once the server listens."""

    @property
    def has_failed(self) -> bool:
        """Return True if the process must exit. Called ten times a second."""

    @property
    def door(self) -> Door:
        """The decisions about requests that arrive while the event loop is busy."""

    def watch(self, connections: Connections, starts: StartQueue) -> None:
        """Record the connections of this process and its queue of waiting requests."""

    def drain(self) -> bool:
        """Report not ready, as the server shuts down. Return False if the service never started."""


class Server(uvicorn.Server):
    """uvicorn's server, which shuts down in steps.

    The steps are: readiness off, no new connections, no new requests, then cancellation. With a
    separate port for admins, the server also listens on it, with the same application. A worker
    listens on its parent's sockets and ends when its parent does.
    """

    def __init__(
        self, application: Application, settings: Settings, worker: Worker | None = None
    ) -> None:
        self._connections = Connections(
            settings.max_connections, settings.max_connections_per_address
        )
        self._tls = load_server_context(settings)
        self._tls_context = None if self._tls is None else self._tls.value
        self._listeners: list[socket.socket] = []
        self._backlog: Backlog | None = None
        self._renewal_fails = False
        starts = StartQueue()
        self._make_protocol = _bind_protocol(application, settings, self._connections, starts)
        super().__init__(_make_config(application, settings, self._accept_from_uvicorn))
        self.application = application
        application.watch(self._connections, starts)
        self._admin_port = settings.admin_port
        self._drain_s = settings.drain_seconds
        self._worker = worker
        self._is_orphan = False
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        own: socket.socket | None = None
        if self._worker is not None:
            signal.signal(STOP_NOW_SIGNAL, self._end_at_once)
            *sockets, own = self._worker.open_sockets()
            asyncio.get_running_loop().add_reader(self._worker.parent, self._on_parent_exit)
        if self._admin_port is not None:
            assert sockets is not None, "`bind` gives them"
            self.application.set_admin_port(sockets[1].getsockname()[1])
        if self._tls_context is not None:
            self.config.ssl = self._tls_context
            # A server closes its sockets at its end, and the next one needs the same sockets.
            self._listeners = [listener.dup() for listener in sockets or ()]
            for listener in self._listeners:
                # Duplicates share this flag; without it, `accept` would block the event loop.
                listener.setblocking(False)
        if sockets:
            self._backlog = Backlog(
                sockets[0], self._accept_from_backlog, lambda: self._tls_context
            )
        await super().startup(sockets)
        for listener in sockets or ():
            # uvicorn logs only sockets that it has created itself.
            log.info("listening on %s port %d", *listener.getsockname()[:2])
        if own is not None:
            # Other workers connect without TLS.
            loop = asyncio.get_running_loop()
            self.servers.append(await loop.create_server(self._accept_internal, sock=own))

    def _accept_internal(self) -> asyncio.Protocol:
        return HttpProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            app=self.application.asgi,
            limits=ConnectionLimits(),
            connections=self._connections,
            build_error=self.application.build_error_response,
        )

    async def on_tick(self, counter: int) -> bool:
        """Check connections, the certificate and the application; uvicorn calls it each 0.1 s."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, HttpProtocol)
                connection.check()
        if self._tls is not None and self._tls.value is not self._tls_context:
            await self._renew(self._tls.value)
        if self.application.has_failed:
            self.exit_code = 1  # so that the process manager restarts this process
            self.should_exit = True
        return await super().on_tick(counter)

    async def _renew(self, context: ssl.SSLContext) -> None:
        """Accept new connections with another TLS context. Existing connections keep theirs.

        TLS sessions cannot be resumed in another context. If listening fails, for example without
        free file descriptors, the old context stays in use until the next tick.
        """
        renewed: list[asyncio.Server] = []
        try:
            for listener in self._listeners:
                server = await self._listen(listener, context)
                renewed.append(server)
        except OSError as error:
            for server in renewed:
                server.close()
            if not self._renewal_fails:
                log.error(
                    "new connections still get the certificate from before, because the server "
                    "cannot listen with the renewed one: %s; it tries again ten times a second",
                    error,
                )
            self._renewal_fails = True
            return
        if self._renewal_fails:
            log.info("new connections get the renewed certificate")
        self._renewal_fails, self._tls_context = False, context
        before = self.servers[: len(renewed)]
        self.servers[: len(renewed)] = renewed
        for server in before:
            server.close()

    async def _listen(self, listener: socket.socket, context: ssl.SSLContext) -> asyncio.Server:
        own = listener.dup()
        try:
            return await asyncio.get_running_loop().create_server(
                self._accept_from_listener, sock=own, ssl=context, backlog=self.config.backlog
            )
        except BaseException:
            own.close()
            raise

    def _accept_from_listener(self) -> asyncio.Protocol:
        return self._accept_from_uvicorn(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def _accept_from_uvicorn(self, **arguments: Any) -> asyncio.Protocol:
        """Return the protocol of a connection that one of `servers` has accepted."""
        if self._backlog is not None:
            self._backlog.note_connection()
        protocol: asyncio.Protocol = self._make_protocol(**arguments)
        return protocol

    def _accept_from_backlog(self) -> asyncio.Protocol:
        """Return the protocol of a connection that `Backlog` has accepted."""
        protocol: asyncio.Protocol = self._make_protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.application.drain():
            # Close connections after their next answer, so that clients move to another gateway.
            self._connections.ending = True
            await self._drain()
        # While any copy of a socket is open, the kernel accepts connections that are never served.
        for listener in self._listeners:
            listener.close()
        if self._backlog is not None:
            self._backlog.close()
        await super().shutdown(sockets)
        if self._worker is not None and self._is_orphan:
            self._worker.clean_up()

    async def _drain(self) -> None:
        """Keep serving for the drain period, so that requests on their way are not lost."""
        for _ in range(math.ceil(self._drain_s / _TICK_S)):
            if self.force_exit:
                return
            await asyncio.sleep(_TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Force the exit on a second SIGTERM; uvicorn itself does so only on a second SIGINT.

        A worker's parent sends STOP_NOW_SIGNAL for that instead. A worker may get SIGTERM twice:
        from its parent, and from a service manager that signals all processes of a service.
        """
        if self._worker is None:
            self.force_exit = self.should_exit
        else:
            sig = signal.SIGTERM
        super().handle_exit(sig, frame)

    def _end_at_once(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.force_exit = True

    def _on_parent_exit(self) -> None:
        assert self._worker is not None
        asyncio.get_running_loop().remove_reader(self._worker.parent)
        self.should_exit = self._is_orphan = True


def bind(settings: Settings) -> list[socket.socket]:
    """Return a bound socket for clients, and one for admins if they have their own port.

    Ports are bound before the slow parts of the start, so that a port in use is reported at once.
    The sockets do not listen yet: until then clients are refused instead of waiting.

    Raise ConfigurationError if a port cannot be bound.
    """
    host = settings.host
    ports = {"GATEWAY_PORT": settings.port, "GATEWAY_ADMIN_PORT": settings.admin_port}
    bound = []
    for setting, port in ports.items():
        if port is None:
            continue
        one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            one.close()
            raise ConfigurationError(f"{setting}: {host}:{port}: {error.strerror}") from error
        bound.append(one)
    return bound


def _bind_protocol(
    application: Application, settings: Settings, connections: Connections, starts: StartQueue
) -> Any:
    limits = ConnectionLimits(
        head=settings.header_timeout,
        body=settings.body_timeout,
        write=settings.write_timeout,
    )
    # uvicorn's annotation wants a class, but it only calls the object.
    return partial(
        HttpProtocol,
        app=application.asgi,
        limits=limits,
        connections=connections,
        build_error=application.build_error_response,
        gate=StartGate(starts, application.door),
    )


def _make_config(application: Application, settings: Settings, protocol: Any) -> uvicorn.Config:
    return uvicorn.Config(
        application.asgi,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol,
        interface="asgi3",  # else uvicorn inspects the application
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        # A client could forge these headers to evade the limits by address.
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.shutdown_grace),
    )
