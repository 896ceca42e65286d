"""The local stack: starts Redis, Triton and the gateway, monitors them, and ends them together."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ops.local_stack import servers
from ops.local_stack.binaries import require_cpu_executor
from ops.local_stack.errors import StackError, StopRequested
from ops.local_stack.guard import Guard
from ops.local_stack.llmapi import in_flight, max_seq_len, prepare_llmapi
from ops.local_stack.ports import LOCALHOST
from ops.local_stack.process import Child, adopt_orphans
from ops.local_stack.repository import link, prepare
from ops.local_stack.restart import Backoff
from ops.local_stack.shared_memory import region_prefix, remove_regions
from ops.local_stack.state import ADMIN_KEY_FILE, FILE_NAME, StackState

START_TIMEOUT = 300.0  # seconds for one server; a large model takes minutes to load
STOP_GRACE = 4.0  # seconds from SIGTERM to SIGKILL, one more than the grace periods of the servers
POLL_PERIOD = 0.05
PROGRESS_PERIOD = 5.0
MODELS_PERIOD = 1.0


@dataclass(frozen=True)
class StackOptions:
    """Options of a stack.

    Attributes:
        model: a Hugging Face or engine folder, as for `ops.local_stack.repository.prepare`.
        state_dir: an existing folder for everything that the stack writes.
        model_name: the model's name for the gateway's clients.
        adapters: PEFT folders by the name to serve them under.
        parameters: template parameters of the model repository.
        llmapi: True for the llmapi repository, False for inflight_batcher_llm.
        repository: an existing repository to use; `model` then provides only the tokenizer.
        triton_model: name in Triton of the model with the engine; None if the gateway's settings
            define it.
        load_models: the models that Triton loads; empty for all models of the repository.
        restart: True to restart Redis and Triton when they die.
    """

    model: Path
    state_dir: Path
    model_name: str
    adapters: Mapping[str, Path] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    llmapi: bool = False
    repository: Path | None = None
    triton_model: str | None = None
    load_models: Sequence[str] = ()
    restart: bool = False


class Stack:
    """The running stack, as a context manager that stops the servers when it exits.

    The exit also removes `state.json` and the servers' shared memory files.

    Use this class in the main thread of a process without other threads or child processes.
    """

    def __init__(
        self, options: StackOptions, ports: servers.Ports, stop_requested: Callable[[], bool]
    ) -> None:
        """Prepare the servers without starting them.

        `start` and `watch` call `stop_requested` repeatedly. They raise StopRequested when it
        returns True.
        """
        self._options = options
        self._ports = ports
        self._stop_requested = stop_requested
        self._shm_prefix = region_prefix(options.state_dir)
        logs = options.state_dir / "logs"
        logs.mkdir(exist_ok=True)
        self._redis = servers.redis_child(
            ports.redis, options.state_dir / "redis", logs / "redis.log"
        )
        self._triton = servers.triton_child(
            *(ports, options.state_dir, self._shm_prefix, logs / "triton.log"),
            *servers.loading(options.load_models),
        )
        self._gateway = servers.gateway_child(
            ports,
            servers.ServedModel(
                *(options.model_name, options.model, options.adapters),
                max_seq_len(options.model, options.parameters) if options.llmapi else None,
                in_flight(options.parameters),
                options.triton_model,
            ),
            options.state_dir,
            logs / "gateway.log",
        )
        self._children = (self._redis, self._triton, self._gateway)
        # Process ids of Triton's models, and the time of the last poll for them.
        self._models: set[int] = set()
        self._models_polled_at = 0.0
        self._model_lost = False
        self._triton_is_ready = False

    def __enter__(self) -> Stack:
        self._clean_up()
        adopt_orphans()
        self._guard = Guard(self._clean_up)
        return self

    def __exit__(self, *_: object) -> None:
        # End the gateway before Triton, so that the gateway can still stop requests in Triton.
        self._gateway.terminate()
        self._end(self._gateway, STOP_GRACE)
        for child in (self._triton, self._redis):
            child.terminate()
        for child in (self._triton, self._redis):
            self._end(child, STOP_GRACE)
        self._clean_up()
        self._guard.close()

    @property
    def state(self) -> StackState:
        """Addresses and process ids of the servers. Raises RuntimeError before all are started."""
        triton = f"http://{LOCALHOST}"
        return StackState(
            gateway=f"http://{LOCALHOST}:{self._ports.gateway}",
            triton_http=f"{triton}:{self._ports.triton_http}",
            triton_metrics=f"{triton}:{self._ports.triton_metrics}/metrics",
            triton_grpc=f"{LOCALHOST}:{self._ports.triton_grpc}",
            redis=f"redis://{LOCALHOST}:{self._ports.redis}/0",
            pids={child.name: child.pid for child in self._children},
        )

    def start(self) -> StackState:
        """Start the servers, and wait until the gateway is ready.

        Write the servers' addresses and process ids to `state.json`, and return them.

        Raises StackError, with the end of the log, if a server ends or is not ready in time.
        """
        ports = self._ports
        options = self._options
        require_cpu_executor()
        if options.repository is None:
            make = prepare_llmapi if options.llmapi else prepare
            make(options.model, options.state_dir, options.parameters)
        else:
            link(options.repository, options.state_dir)
        self._launch(self._redis)
        self._launch(self._triton)
        self._wait(self._redis, lambda: servers.answers_ping(ports.redis))
        self._wait(self._triton, self._ask_triton)
        self._poll_models()
        self._launch(self._gateway)
        ready = f"http://{LOCALHOST}:{ports.gateway}/health/ready"
        self._wait(self._gateway, lambda: servers.answers_ok(ready))
        self.state.write(self._options.state_dir)
        return self.state

    def watch(self) -> NoReturn:
        """Monitor the servers until a stop is requested, which raises StopRequested.

        Raises StackError if a server dies. With the option `restart`, Redis and Triton are started
        again on the same ports instead.
        """
        backoffs = {child.name: Backoff() for child in (self._redis, self._triton)}
        while True:
            for child in self._children:
                if child.exit_status() is not None:
                    how = child.how_it_ended()
                elif child is self._triton and self._model_died():
                    how = (
                        "triton: the process of a model has died, which Triton neither notices nor "
                        f"mends; the end of {child.log}:\n{child.last_lines()}"
                    )
                else:
                    continue
                if not self._options.restart or child is self._gateway:
                    raise StackError(how)
                self._start_again(child, how, backoffs[child.name])
            self._pause()

    def _model_died(self) -> bool:
        """Return True if the process of a Python model has died.

        Triton itself does not notice this, and still reports ready.

        A model's process is a child process of Triton with the name `MODEL_PROCESS`. Triton may
        have other children: a process that it has just forked has a different name at first.
        """
        starts = not self._triton_is_ready
        if starts:
            self._ask_triton()
        # Poll in every call while Triton starts. With a pause of `MODELS_PERIOD`, a process that
        # starts and dies in this time would not be noticed.
        if starts or time.monotonic() - self._models_polled_at > MODELS_PERIOD:
            self._poll_models()
        if starts and self._triton_is_ready:
            print_status("triton: ready")
        return self._model_lost

    def _ask_triton(self) -> bool:
        url = f"http://{LOCALHOST}:{self._ports.triton_http}/v2/health/ready"
        self._triton_is_ready = servers.answers_ok(url)
        return self._triton_is_ready

    def _poll_models(self) -> None:
        self._models_polled_at = time.monotonic()
        self._models |= (running := self._triton.children(servers.MODEL_PROCESS))
        self._model_lost = bool(self._models - running)

    def _start_again(self, child: Child, how: str, backoff: Backoff) -> None:
        if (delay := backoff.record_death()) is not None:
            print_status(f"{how}\n{child.name}: starting again in {delay:g} s")
        if backoff.is_due():
            self._end(child, grace=0)
            if child is self._triton:
                remove_regions(self._shm_prefix)
                self._models, self._model_lost = set(), False
                self._triton_is_ready = False
            self._launch(child)
            backoff.record_start()
            self.state.write(self._options.state_dir)

    def _launch(self, child: Child) -> None:
        child.start()
        self._guard.add(child.pid)
        print_status(f"{child.name}: started, process {child.pid}")

    def _end(self, child: Child, grace: float) -> None:
        if child.is_started:
            pid = child.pid
            child.reap(grace)
            self._guard.remove(pid)

    def _clean_up(self) -> None:
        remove_regions(self._shm_prefix)
        (self._options.state_dir / FILE_NAME).unlink(missing_ok=True)

    def _wait(self, child: Child, is_ready: Callable[[], bool]) -> None:
        began = said = time.monotonic()
        while not is_ready():
            self._pause()
            self._check_all()
            now = time.monotonic()
            if now - began > START_TIMEOUT:
                raise StackError(
                    f"{child.name} is not ready after {START_TIMEOUT:g} s; the end of "
                    f"{child.log}:\n{child.last_lines()}"
                )
            if now - said > PROGRESS_PERIOD:
                last = child.last_lines(1).removeprefix("  | ")
                print_status(
                    f"{child.name}: not ready yet ({now - began:.0f} s); {child.log}: {last}"
                )
                said = now
        # Check that all children are still running. If this child has ended, another server on the
        # same port has answered.
        self._check_all()
        print_status(f"{child.name}: ready")

    def _check_all(self) -> None:
        for child in self._children:
            if child.is_started and child.exit_status() is not None:
                raise StackError(child.how_it_ended())

    def _pause(self) -> None:
        time.sleep(POLL_PERIOD)
        if self._stop_requested():
            raise StopRequested


def pages(gateway: str, state_dir: Path) -> list[str]:
    """Return a line of text for each web page of the running gateway, with the page's URL."""
    port = os.environ.get("GATEWAY_ADMIN_PORT")
    operators = f"http://{LOCALHOST}:{port}/" if port else f"{gateway}/operators"
    key = state_dir / ADMIN_KEY_FILE
    found = {f"{gateway}/": "playground: {}", operators: f"operators' page: {{}}, key in {key}"}
    # Request each page, because GATEWAY_CONSOLE=false turns off both pages.
    return [text.format(url) for url, text in found.items() if servers.answers_ok(url)]


def print_status(line: str) -> None:
    """Print a status line to stderr, because stdout is only for the line `ready: URL`."""
    print(line, file=sys.stderr, flush=True)
