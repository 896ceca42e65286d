"""Runs the application under uvicorn until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from gateway.api.failures import answer
from gateway.app import compose, create_api
from gateway.config.settings import Settings
from gateway.http.protocol import ConnectionLimits, HttpProtocol
from gateway.http.tls import check_tls, uvicorn_options
from gateway.http.workers import Worker, Workers
from gateway.observability.logs import configure_logging
from gateway.service import tracer_class
from gateway.tenancy.access import configuration_file

# Longer than clients and proxies keep idle connections (httpx 5 s, load balancers 60 s): whoever
# closes first must not be the server, or a request that is just being sent is lost.
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_TICK_S = 0.1


class Server(uvicorn.Server):
    """Ends in steps: readiness off, no new connections, no new requests, then cancellation.

    With a port for admins it listens there too, with the same application. A worker listens on
    what its parent gave it, and ends with its parent.
    """

    def __init__(
        self, config: uvicorn.Config, api: FastAPI, settings: Settings, worker: Worker | None
    ) -> None:
        super().__init__(config)
        self.api = api
        self._admin_port = settings.admin_port
        self._drain_s = settings.drain_seconds
        self._worker = worker
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        own: socket.socket | None = None
        if self._worker is not None:
            *sockets, own = self._worker.sockets()
            asyncio.get_running_loop().add_reader(self._worker.parent, self._orphaned)
        elif self._admin_port is not None:
            sockets = sockets or listen(self.config.host, [self.config.port, self._admin_port])
        if self._admin_port is not None:
            assert sockets is not None
            self.api.state.admin_port = sockets[1].getsockname()[1]
        await super().startup(sockets)
        if own is not None:
            # The other workers know no certificates.
            loop = asyncio.get_running_loop()
            self.servers.append(await loop.create_server(self._internal_protocol, sock=own))

    def _internal_protocol(self) -> asyncio.Protocol:
        return HttpProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            limits=ConnectionLimits(),
            answer=answer,
        )

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second until it shuts down."""
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, HttpProtocol)
                connection.check()
        if self.api.state.service.failed.is_set():
            self.exit_code = 1  # so that whoever started this process starts another
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if (service := getattr(self.api.state, "service", None)) is not None:
            service.replicas.draining = True
            await self._drain()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Still answers, so that no connection is closed on a request that is on its way."""
        for _ in range(math.ceil(self._drain_s / _TICK_S)):
            if self.force_exit:
                return
            await asyncio.sleep(_TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own takes only a second SIGINT, but no second SIGTERM, for impatience."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    def _orphaned(self) -> None:
        assert self._worker is not None
        asyncio.get_running_loop().remove_reader(self._worker.parent)
        self.should_exit = True


def listen(host: str, ports: Sequence[int]) -> list[socket.socket]:
    """Raises SystemExit when a port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listeners = []
    for port in ports:
        try:
            listeners.append(socket.create_server((host, port), family=family, backlog=_BACKLOG))
        except OSError as error:
            raise SystemExit(f"{host}:{port}: {error.strerror}") from error
    return listeners


def build_server(settings: Settings, worker: Worker | None = None) -> Server:
    """A server that has not begun to listen; `api.state` is its application's."""
    api = create_api(settings, worker)
    limits = ConnectionLimits(
        head=settings.header_timeout,
        body=settings.body_timeout,
        write=settings.write_timeout,
        connections=settings.max_connections,
    )
    config = uvicorn.Config(
        compose(api, settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=cast(
            Any, partial(HttpProtocol, limits=limits, answer=answer)
        ),  # uvicorn only calls it
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.shutdown_grace),
        **uvicorn_options(settings),
    )
    return Server(config, api, settings, worker)


def serve(settings: Settings) -> int:
    """Blocks; returns the exit code. Raises SystemExit for a taken port, and ConfigurationError."""
    configure_logging(settings.log_level, settings.log_format)
    configuration_file(settings)  # what is wrong with it is told before anything starts
    check_tls(settings)
    tracer_class(settings)
    worker = Worker.from_environment()
    if settings.workers > 1 and worker is None:
        ports = (
            [settings.port]
            if settings.admin_port is None
            else [
                settings.port,
                settings.admin_port,
            ]
        )
        return Workers(settings.workers, listen(settings.host, ports)).run()
    server = build_server(settings, worker)
    server.run()
    return server.exit_code
