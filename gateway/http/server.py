"""Subclass of uvicorn's server that adds listening sockets, connection timeouts and a drain period.

`UNDOCUMENTED` lists the undocumented attributes of uvicorn that this module uses.

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
    """Interface that the class `Server` requires of the application."""

    @property
    def asgi(self) -> Callable[..., Any]:
        """The ASGI application."""

    @property
    def build_error_response(self) -> BuildErrorResponse:
        """Function that builds the error responses that the HTTP layer sends itself.

        The errors occur before the application gets the request, or if the application fails.
        """

    def set_admin_port(self, admin_port: int) -> None:
        """Set the port for admins. Called at the start, before the server accepts requests."""

    @property
    def has_failed(self) -> bool:
        """True if an error occurred that requires the process to exit. Read ten times a second."""

    @property
    def door(self) -> Door:
        """Object that decides which requests wait or are refused while the event loop is busy."""

    def watch(self, connections: Connections, starts: StartQueue) -> None:
        """Store the server's connections and start queue, so that the application can report them.

        The start queue contains requests that wait while the event loop is busy.
        """

    def drain(self) -> bool:
        """Report "not ready" to load balancers from now on. Called when the server shuts down.

        Return False if the service has never started, so that the server need not wait for the
        drain period.
        """


class Server(uvicorn.Server):
    """HTTP server of one process, which shuts down in steps.

    The steps are: report "not ready", refuse new connections, refuse new requests, cancel running
    requests. If a separate port for admins is configured, the server also listens on this port with
    the same application. In a worker process, the server listens on the sockets of the parent
    process, and ends when the parent ends.
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
            # Keep duplicates of the listening sockets. When the certificate is renewed, a new
            # asyncio server replaces the old server, which closes its sockets. The new server
            # listens on copies of these duplicates.
            self._listeners = [listener.dup() for listener in sockets or ()]
            for listener in self._listeners:
                # Make the socket non-blocking, because `accept` must not block the event loop. All
                # duplicates of a socket share this flag.
                listener.setblocking(False)
        if sockets:
            self._backlog = Backlog(
                sockets[0], self._accept_from_backlog, lambda: self._tls_context
            )
        await super().startup(sockets)
        for listener in sockets or ():
            # Log the addresses here: uvicorn logs only sockets that it has created itself.
            log.info("listening on %s port %d", *listener.getsockname()[:2])
        if own is not None:
            # Listen on the worker's Unix socket for requests from other workers, without TLS.
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
        """Check connection timeouts, renew the TLS certificate, and stop if the application failed.

        uvicorn calls this every 0.1 s. Return True if the server must stop.
        """
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, HttpProtocol)
                connection.check()
        if self._tls is not None and self._tls.value is not self._tls_context:
            await self._renew(self._tls.value)
        if self.application.has_failed:
            self.exit_code = 1  # a failure, so that the process manager restarts this process
            self.should_exit = True
        return await super().on_tick(counter)

    async def _renew(self, context: ssl.SSLContext) -> None:
        """Use a new TLS context for new connections. Existing connections keep the old context.

        Clients cannot resume TLS sessions of the old context. If the server cannot listen with the
        new context, for example because no file descriptor is free, the old context stays in use.
        The next `on_tick` then tries again.
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
        """Return the protocol for a connection that a server in `self.servers` has accepted."""
        if self._backlog is not None:
            self._backlog.note_connection()
        protocol: asyncio.Protocol = self._make_protocol(**arguments)
        return protocol

    def _accept_from_backlog(self) -> asyncio.Protocol:
        """Return the protocol for a connection that `Backlog` has accepted."""
        protocol: asyncio.Protocol = self._make_protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.application.drain():
            # Close each connection after its next response, so that clients connect to another
            # gateway.
            self._connections.ending = True
            await self._drain()
        # Close all duplicates of the listening sockets. While any duplicate is open, the kernel
        # accepts connections, which would never be served.
        for listener in self._listeners:
            listener.close()
        if self._backlog is not None:
            self._backlog.close()
        await super().shutdown(sockets)
        if self._worker is not None and self._is_orphan:
            self._worker.clean_up()

    async def _drain(self) -> None:
        """Wait for the drain period, during which requests are still served.

        Load balancers need this time to notice that the server is not ready. Return early if an
        immediate exit is requested.
        """
        for _ in range(math.ceil(self._drain_s / _TICK_S)):
            if self.force_exit:
                return
            await asyncio.sleep(_TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down at the first SIGTERM or SIGINT. Exit at once at the second, except in a worker.

        uvicorn itself exits at once only if the second signal is a SIGINT. A worker process may get
        two signals for one shutdown: from its parent, and from a service manager that signals all
        processes of a service. A second signal therefore does not force a worker to exit. To make a
        worker exit at once, the parent sends STOP_NOW_SIGNAL.
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
    """Return a bound socket for clients, and one for admins if they have a separate port.

    Call this before the slow steps of the start, so that a port in use is reported at once. The
    sockets do not listen yet. Until the server listens, the kernel refuses connections at once, and
    clients need not wait for the end of the start.

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
    # uvicorn's type annotation demands a class here, but uvicorn only calls the object. A `partial`
    # therefore works, too.
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
        interface="asgi3",  # set, so that uvicorn does not inspect the application
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        # Ignore headers such as x-forwarded-for: a client could forge them to evade the connection
        # limit per address.
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.shutdown_grace),
    )
