"""Runs the application under uvicorn until SIGTERM or SIGINT."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from gateway.app import create_app
from gateway.http_protocol import HttpProtocol
from gateway.settings import Settings
from gateway.telemetry import configure_logging

# Longer than clients and proxies keep idle connections (httpx 5 s, load balancers 60 s): whoever
# closes first must not be the server, or a request that is just being sent is lost.
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """Marks the engine as draining before running requests are asked to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if (service := getattr(self._app.state, "service", None)) is not None:
            service.engine.draining = True
        await super().shutdown(sockets)


def build_server(settings: Settings) -> uvicorn.Server:
    """A server that has not begun to listen; its application is `config.app`."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.shutdown_grace),
    )
    return _Server(config, app)


def serve(settings: Settings) -> None:
    """Blocks. Raises SystemExit when the port is taken."""
    configure_logging(settings.log_level)
    build_server(settings).run()
