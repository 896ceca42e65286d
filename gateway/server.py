"""Runs the application until SIGTERM or SIGINT, in one process or in several."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gateway.api.failures import answer
from gateway.app import compose, create_api
from gateway.config.settings import Settings
from gateway.http.server import Server, listen
from gateway.http.tls import check_tls
from gateway.http.workers import Worker, Workers
from gateway.observability.logs import configure_logging
from gateway.service import Service, tracer_class
from gateway.tenancy.access import configuration_file


class Gateway:
    """What the server serves; implements `http.server.Application`."""

    def __init__(self, settings: Settings, worker: Worker | None = None) -> None:
        self.api = create_api(settings, worker)
        self.asgi = compose(self.api, settings)
        self.answer = answer

    @property
    def service(self) -> Service | None:
        """None before it has started, and when it could not."""
        return getattr(self.api.state, "service", None)

    def listening(self, admin_port: int) -> None:
        self.api.state.admin_port = admin_port

    @property
    def failed(self) -> bool:
        return self.service is not None and self.service.failed.is_set()

    def drain(self) -> bool:
        if self.service is None:
            return False
        self.service.replicas.draining = True
        return True


def serve(settings: Settings) -> int:
    """Blocks; returns the exit code. Raises SystemExit for a taken port, and ConfigurationError."""
    configure_logging(settings.log_level, settings.log_format)
    check_tls(settings)
    tracer_class(settings)
    worker = Worker.from_environment()
    if settings.workers > 1 and worker is None:
        return _serve_with_workers(settings)
    # What is wrong with it is told before anything starts.
    configuration_file(settings, None if worker is None else worker.folder)
    server = Server(Gateway(settings, worker), settings, worker)
    server.run()
    return server.exit_code


def _serve_with_workers(settings: Settings) -> int:
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        folder = Path(name)
        # Before any worker has read it, so that all of them know whether keys were on.
        configuration_file(settings, folder)
        ports = [settings.port]
        if settings.admin_port is not None:
            ports.append(settings.admin_port)
        return Workers(settings.workers, listen(settings.host, ports), folder).run()
