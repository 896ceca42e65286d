"""Function `serve`, which runs the gateway in one or more processes until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from gateway.api.failures import build_response
from gateway.app import compose, create_api, make_door
from gateway.config.file import ConfigurationError
from gateway.config.settings import Settings
from gateway.http.connections import Connections
from gateway.http.server import Server, bind
from gateway.http.tls import load_server_context
from gateway.http.workers import Worker, Workers, report_bad_settings
from gateway.memory import trim
from gateway.observability.logs import configure_logging
from gateway.scheduling.start_queue import StartQueue
from gateway.service import Service
from gateway.service_setup import check_configuration, load_tracer_class
from gateway.state_setup import check_database
from lora_store import connect

# Number of new objects after which the garbage collector runs. About a hundred requests create so
# many objects. With Python's default, the collector would run every few requests.
_GC_THRESHOLD_OBJECTS = 10_000


class GatewayApplication:
    """Application for the HTTP server. Implements `gateway.http.server.Application`."""

    def __init__(self, settings: Settings, worker: Worker | None = None) -> None:
        self.api = create_api(settings, worker)
        self.asgi = compose(self.api, settings)
        self.door = make_door(self.api, settings)
        self.build_error_response = build_response

    @property
    def service(self) -> Service | None:
        """The service; None before the service has started, or if its start has failed."""
        return getattr(self.api.state, "service", None)

    def set_admin_port(self, admin_port: int) -> None:
        self.api.state.admin_port = admin_port

    def watch(self, connections: Connections, starts: StartQueue) -> None:
        self.api.state.connections = connections
        self.api.state.starts = starts

    @property
    def has_failed(self) -> bool:
        return self.service is not None and self.service.failed.is_set()

    def drain(self) -> bool:
        if self.service is None:
            return False
        self.service.replicas.draining = True
        return True


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit code of the process.

    Raise ConfigurationError for wrong settings or a port in use.
    """
    configure_logging(settings.log_level, settings.log_format)
    load_server_context(settings)  # report a bad certificate file before anything starts
    load_tracer_class(settings)
    check_database(settings)
    if settings.workers > 1:
        return _serve_with_workers(settings)
    # Report a bad configuration file before anything starts.
    check_configuration(settings)
    listeners = bind(settings)
    server = Server(GatewayApplication(settings), settings)
    _relax_garbage_collection()
    server.run(listeners)
    return server.exit_code


def _serve_with_workers(settings: Settings) -> int:
    with tempfile.TemporaryDirectory(prefix="gateway-") as name:
        folder = Path(name)

        def work(worker: Worker) -> int:
            try:
                # The file may have changed since the parent checked it.
                check_configuration(settings, folder)
                server = Server(GatewayApplication(settings, worker), settings, worker)
                _relax_garbage_collection()
                server.run()
                return server.exit_code
            except ConfigurationError as error:
                return report_bad_settings(error)

        if settings.redis_url is not None:
            connect.load()  # import redis-py before workers start, so that they share its memory
        # Check the configuration before workers start, so that all of them agree whether keys are
        # required.
        check_configuration(settings, folder)
        return Workers(settings.workers, bind(settings), folder, work).run()


def _relax_garbage_collection() -> None:
    """Make the garbage collector run rarely, and exclude all existing objects from it.

    The existing objects live as long as the process, and requests create no reference cycles, so
    the collector finds hardly any garbage. Scanning all objects repeatedly took a tenth of the CPU
    time, and each scan delayed all running requests by 90 ms.
    """
    gc.collect()
    gc.freeze()
    trim()  # return memory to the system that was needed only during the start
    gc.set_threshold(_GC_THRESHOLD_OBJECTS, *gc.get_threshold()[1:])
