"""uvicorn's server: where it listens, how it looks after its connections, and how it ends.

`UNDOCUMENTED` lists what this file uses of uvicorn that its documentation does not promise.
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
from gateway.http.protocol import Answer, ConnectionLimits, HttpProtocol
from gateway.http.start_gate import Door, StartGate
from gateway.http.tls import load_server_context
from gateway.http.workers import AT_ONCE, Worker
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
    """What is served, and what its server tells it and asks it."""

    @property
    def asgi(self) -> Callable[..., Any]:
        """The ASGI application."""

    @property
    def answer(self) -> Answer:
        """For what a connection answers itself."""

    def listening(self, admin_port: int) -> None:
        """The port for admins, once it is known."""

    @property
    def failed(self) -> bool:
        """Whether it cannot go on; asked ten times a second."""

    @property
    def door(self) -> Door:
        """For requests that find the event loop busy."""

    def watch(self, connections: Connections, starts: StartQueue) -> None:
        """Take note of all connections of this process, and of the requests that wait for it."""

    def drain(self) -> bool:
        """The server will end: no new requests should be sent here. False if it never began."""


class Server(uvicorn.Server):
    """Ends in steps: readiness off, no new connections, no new requests, then cancellation.

    With a port for admins it listens there too, with the same application. A worker listens on
    what its parent gave it, and ends with its parent.
    """

    def __init__(
        self, application: Application, settings: Settings, worker: Worker | None = None
    ) -> None:
        self._connections = Connections(
            settings.max_connections, settings.max_connections_per_address
        )
        self._tls = load_server_context(settings)
        self._serves_with = None if self._tls is None else self._tls.value
        self._listeners: list[socket.socket] = []
        self._backlog: Backlog | None = None
        self._renewal_fails = False
        starts = StartQueue()
        self._make_protocol = _protocol(application, settings, self._connections, starts)
        super().__init__(_config(application, settings, self._take_protocol))
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
            signal.signal(AT_ONCE, self._end_at_once)
            *sockets, own = self._worker.sockets()
            asyncio.get_running_loop().add_reader(self._worker.parent, self._orphaned)
        if self._admin_port is not None:
            assert sockets is not None, "`bind` gives them"
            self.application.listening(sockets[1].getsockname()[1])
        if self._serves_with is not None:
            self.config.ssl = self._serves_with
            # Servers close what they listen on, and later ones must listen on the same.
            self._listeners = [listener.dup() for listener in sockets or ()]
            for listener in self._listeners:
                # All that are duplicated share this: else an accept would block the event loop.
                listener.setblocking(False)
        if sockets:
            self._backlog = Backlog(sockets[0], self._new_protocol, lambda: self._serves_with)
        await super().startup(sockets)
        for listener in sockets or ():
            # uvicorn tells only of sockets that it has made itself.
            log.info("listening on %s port %d", *listener.getsockname()[:2])
        if own is not None:
            # The other workers know no certificates.
            loop = asyncio.get_running_loop()
            self.servers.append(await loop.create_server(self._internal_protocol, sock=own))

    def _internal_protocol(self) -> asyncio.Protocol:
        return HttpProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            app=self.application.asgi,
            limits=ConnectionLimits(),
            connections=self._connections,
            answer=self.application.answer,
        )

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second until it shuts down."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, HttpProtocol)
                connection.check()
        if self._tls is not None and self._tls.value is not self._serves_with:
            await self._renew(self._tls.value)
        if self.application.failed:
            self.exit_code = 1  # so that whoever started this process starts another
            self.should_exit = True
        return await super().on_tick(counter)

    async def _renew(self, context: ssl.SSLContext) -> None:
        """Take new connections with another context. Those that are there go on as they are.

        Sessions are resumed within a context alone, so none of before is. Without descriptors, say,
        all stays as it is until the next tick.
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
        self._renewal_fails, self._serves_with = False, context
        before = self.servers[: len(renewed)]
        self.servers[: len(renewed)] = renewed
        for server in before:
            server.close()

    async def _listen(self, listener: socket.socket, context: ssl.SSLContext) -> asyncio.Server:
        own = listener.dup()
        try:
            return await asyncio.get_running_loop().create_server(
                self._client_protocol, sock=own, ssl=context, backlog=self.config.backlog
            )
        except BaseException:
            own.close()
            raise

    def _client_protocol(self) -> asyncio.Protocol:
        return self._take_protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def _take_protocol(self, **arguments: Any) -> asyncio.Protocol:
        """Return the protocol of a connection that one of `servers` has taken."""
        if self._backlog is not None:
            self._backlog.note_connection()
        protocol: asyncio.Protocol = self._make_protocol(**arguments)
        return protocol

    def _new_protocol(self) -> asyncio.Protocol:
        """Return the protocol of a connection that was taken besides."""
        protocol: asyncio.Protocol = self._make_protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.application.drain():
            # A client's next request finds another gateway.
            self._connections.ending = True
            await self._drain()
        # While anybody holds them, the kernel takes connections that nobody serves.
        for listener in self._listeners:
            listener.close()
        if self._backlog is not None:
            self._backlog.close()
        await super().shutdown(sockets)
        if self._worker is not None and self._is_orphan:
            self._worker.clean_up()

    async def _drain(self) -> None:
        """Still answers, so that no connection is closed on a request that is on its way."""
        for _ in range(math.ceil(self._drain_s / _TICK_S)):
            if self.force_exit:
                return
            await asyncio.sleep(_TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own takes only a second SIGINT, but no second SIGTERM, for impatience.

        A worker's parent has a signal of its own for that. These may come to a worker twice: from
        its parent, and from a service manager that signals all processes of a service.
        """
        if self._worker is None:
            self.force_exit = self.should_exit
        else:
            sig = signal.SIGTERM
        super().handle_exit(sig, frame)

    def _end_at_once(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.force_exit = True

    def _orphaned(self) -> None:
        assert self._worker is not None
        asyncio.get_running_loop().remove_reader(self._worker.parent)
        self.should_exit = self._is_orphan = True


def bind(settings: Settings) -> list[socket.socket]:
    """A socket for clients, and one for admins where they have a port of their own.

    Whoever takes long to start binds first, so that a taken port is told at once. Nothing listens
    yet: until it is served, clients are refused and need not wait. Raises ConfigurationError.
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


def _protocol(
    application: Application, settings: Settings, connections: Connections, starts: StartQueue
) -> Any:
    limits = ConnectionLimits(
        head=settings.header_timeout,
        body=settings.body_timeout,
        write=settings.write_timeout,
    )
    # uvicorn annotates it as a class, and only calls it.
    return partial(
        HttpProtocol,
        app=application.asgi,
        limits=limits,
        connections=connections,
        answer=application.answer,
        gate=StartGate(starts, application.door),
    )


def _config(application: Application, settings: Settings, protocol: Any) -> uvicorn.Config:
    return uvicorn.Config(
        application.asgi,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol,
        interface="asgi3",  # else it looks whether the application is a coroutine's function
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        # What a client says of its address is nothing to count wrong keys and connections by.
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.shutdown_grace),
    )
