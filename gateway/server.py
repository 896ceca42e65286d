"""Runs the application until SIGTERM or SIGINT, in one process or in several."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from gateway.api.failures import answer
from gateway.app import compose, create_api, make_door
from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings
from gateway.http.connections import Connections
from gateway.http.server import Server, bind
from gateway.http.tls import load_server_context
from gateway.http.workers import Worker, Workers, refuse
from gateway.memory import trim
from gateway.observability.logs import configure_logging
from gateway.scheduling.start_queue import StartQueue
from gateway.service import Service
from gateway.service_setup import check_configuration, tracer_class
from lora_store import connect

# New objects after which the garbage collector looks for cycles. About a hundred requests leave so
# many; Python's own threshold is reached every few requests.
_NEW_OBJECTS = 10_000


class Gateway:
    """What the server serves; implements `http.server.Application`."""

    def __init__(self, settings: Settings, worker: Worker | None = None) -> None:
        self.api = create_api(settings, worker)
        self.asgi = compose(self.api, settings)
        self.door = make_door(self.api, settings)
        self.answer = answer

    @property
    def service(self) -> Service | None:
        """None before it has started, and when it could not."""
        return getattr(self.api.state, "service", None)

    def listening(self, admin_port: int) -> None:
        self.api.state.admin_port = admin_port

    def watch(self, connections: Connections, starts: StartQueue) -> None:
        self.api.state.connections = connections
        self.api.state.starts = starts

    @property
    def failed(self) -> bool:
        return self.service is not None and self.service.failed.is_set()

    def drain(self) -> bool:
        if self.service is None:
            return False
        self.service.replicas.draining = True
        return True


def serve(settings: Settings) -> int:
    """Blocks; returns the exit code. Raises ConfigurationError, for a taken port too."""
    configure_logging(settings.log_level, settings.log_format)
    load_server_context(settings)  # reports a bad file before anything starts
    tracer_class(settings)
    if settings.workers > 1:
        return _serve_with_workers(settings)
    # What is wrong with it is told before anything starts.
    check_configuration(settings)
    listeners = bind(settings)
    server = Server(Gateway(settings), settings)
    _collect_seldom()
    server.run(listeners)
    return server.exit_code


def _serve_with_workers(settings: Settings) -> int:
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        folder = Path(name)

        def work(worker: Worker) -> int:
            try:
                # It may have changed since the parent looked.
                check_configuration(settings, folder)
                server = Server(Gateway(settings, worker), settings, worker)
                _collect_seldom()
                server.run()
                return server.exit_code
            except ConfigurationError as error:
                return refuse(error)

        if settings.redis_url is not None:
            connect.load()  # so that workers share it, too
        # Before any worker has read it, so that all of them know whether keys were on.
        check_configuration(settings, folder)
        return Workers(settings.workers, bind(settings), folder, work).run()


def _collect_seldom() -> None:
    """Has the garbage collector look rarely, and never at the objects that are there now.

    Those live as long as the process, and an answered request leaves no cycles behind, so there is
    hardly anything to find. To look through all objects again and again took a tenth of the CPU,
    and held every request up for 90 ms at a time.
    """
    gc.collect()
    gc.freeze()
    trim()  # of what it took to come here
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
