"""Processes that the benchmark measures or needs: gateways, Tritons and Redis.

Each context manager starts a process on its assigned cores, waits until the process is ready, and
terminates the process at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.load import Clients
from bench.machine import ROOT, Cores
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import Child
from ops.local_stack.repository import PARAMETERS
from ops.local_stack.servers import Ports, answers_ok, redis_child, triton_child
from ops.local_stack.shared_memory import region_prefix, remove_regions
from triton_repo.cpu_executor import synthetic
from triton_repo.llmapi_repository import render_llmapi
from triton_repo.render import render

MODEL = ROOT / "demo" / "model"
READY_WITHIN_S = 90.0
MAX_SEQ_LEN = 1_000_000
TRITON_TOKENS_PER_SECOND = 50.0
_ONE_INSTANCE = "instance_group [ { count: 1 "
CHAT = "/v1/chat/completions"


class Unmeasured(Exception):
    """A measurement of the benchmark was impossible. The message has the reason."""


@dataclass(frozen=True)
class Server:
    """A process that answers chat requests on `port` of 127.0.0.1.

    `path` is the URL path for chats, `live` that of the liveness probe. `script` is the request
    parameter that selects the pace of the scripted upstream: the process must pass it on unchanged.
    `key` is the API key in the clients' requests.
    """

    name: str
    pid: int
    port: int
    path: str = CHAT
    live: str = "/health/live"
    script: str = "seed"
    key: str = "unused"

    def body(self, chat: bytes) -> bytes:
        """Return a chat's body for this server, with the parameter `script` instead of `seed`."""
        return chat.replace(b'"seed"', f'"{self.script}"'.encode())

    def _family(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def cpu_s(self) -> float:
        """Return the user and system time of the process, with threads and children, in seconds."""
        times = [process.cpu_times() for process in self._family()]
        return float(sum(t.user + t.system for t in times))

    def rss(self) -> int:
        """Return the resident bytes of the process and its children."""
        return sum(process.memory_info().rss for process in self._family())


@dataclass(kw_only=True)
class Bench:
    """Environment of a benchmark run, which every part receives as its argument.

    `folder` is for temporary files. `seconds` is the default length of a measurement window.
    `rounds` is the number of alternating windows, or None for each part's default. `notes` are
    printed below the tables.
    """

    folder: Path
    claims: PortClaims
    cores: Cores
    clients: Clients
    seconds: float
    quick: bool
    rounds: int | None = None
    notes: list[str] = field(default_factory=list)

    def log(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def running(
        self, name: str, command: Sequence[str], ready: str | None, cores: Iterable[int], **env: str
    ) -> Iterator[Child]:
        """Run a child process on `cores`, with the environment variables `env`.

        The context is entered when the URL `ready` returns a success. If `ready` is None, it is
        entered when the process listens on a port.
        """
        child = Child(name, command, environment(env), self.folder / f"{name}.log")
        start_on(child, cores)
        try:
            wait_ready(child, ready)
            yield child
        finally:
            child.terminate()
            child.reap(5.0)

    @contextlib.contextmanager
    def upstream(self, *, llmapi: bool = False, seed: int | None = None) -> Iterator[str]:
        """Run a scripted Triton for each upstream core, all on one port. Yield host:port.

        The Tritons serve the model of the repository inflight_batcher_llm or, if `llmapi` is True,
        of the repository llmapi. `seed` replaces the seeds of the requests.
        """
        cores = self.cores
        name = "scripted-llmapi" if llmapi else "scripted"
        repository, port = self.folder / name, self.claims.take_free()
        engine = self.folder / "scripted-engine"
        synthetic.build(engine, vocab_size=4096, max_seq_len=MAX_SEQ_LEN)
        parameters: dict[str, Any] = {
            **PARAMETERS,
            "engine_dir": str(engine),
            "tokenizer_dir": str(MODEL),
        }
        if llmapi:
            render_llmapi(repository, {"model": str(engine)})
        else:
            render(repository, parameters)
        command = [sys.executable, "-m", "bench.upstream", "--port", str(port)]
        command += ["--repository", str(repository), "--events", str(self.events)]
        if seed is not None:
            command += ["--seed", str(seed)]
        with contextlib.ExitStack() as stack:
            count = 1 if cores.upstream == cores.client else len(cores.upstream)
            for n in range(count):
                process = self.running(f"{name}-{n}", command, None, cores.upstream)
                stack.enter_context(process)
            yield f"{LOCALHOST}:{port}"

    @property
    def events(self) -> Path:
        """File in which scripted upstreams log the events of requests (see `bench.upstream`)."""
        return self.folder / "events.jsonl"

    @contextlib.contextmanager
    def gateway(
        self,
        triton: str,
        *,
        workers: int = 1,
        name: str = "gateway",
        settings: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> Iterator[Server]:
        """Run `gateway serve` on the gateway's cores, without adapters.

        A Redis server is started only for several workers. `settings` are additional environment
        variables. `under` is the command of a tool, such as valgrind, that runs the gateway.
        """
        port = self.claims.take_free()
        env = {
            "GATEWAY_PORT": str(port),
            "GATEWAY_TRITON_GRPC": triton,
            "GATEWAY_TOKENIZER_DIR": str(MODEL),
            "GATEWAY_STORE_DIR": str(self.folder / f"{name}-adapters"),
            "GATEWAY_SHUTDOWN_GRACE": "1",
            **(settings or {}),
        }
        command = [*under, sys.executable, "-m", "gateway"]
        ready = f"http://{LOCALHOST}:{port}/health/ready"
        with contextlib.ExitStack() as stack:
            if workers > 1:
                env["GATEWAY_WORKERS"] = str(workers)
                if "GATEWAY_REDIS_URL" not in env:
                    env["GATEWAY_REDIS_URL"] = stack.enter_context(self.redis())
            gateway = self.running(name, command, ready, self.cores.gateway, **env)
            yield Server(name, stack.enter_context(gateway).pid, port)

    @contextlib.contextmanager
    def redis(self) -> Iterator[str]:
        """Run a Redis server, which a gateway with several workers needs. Yield its URL."""
        port = self.claims.take_free()
        child = redis_child(port, self.folder / "redis", self.folder / "redis.log")
        start_on(child, self.cores.upstream)
        try:
            wait_ready(child, None)
            yield f"redis://{LOCALHOST}:{port}/0"
        finally:
            child.terminate()
            child.reap(5.0)

    @contextlib.contextmanager
    def ordinary(self, triton: str) -> Iterator[Server]:
        port = self.claims.take_free()
        command = [sys.executable, "-m", "bench.ordinary_gateway", "--port", str(port)]
        command += ["--triton", triton, "--tokenizer", str(MODEL)]
        ready = f"http://{LOCALHOST}:{port}/health/live"
        with self.running("ordinary", command, ready, self.cores.gateway) as child:
            yield Server("ordinary gateway", child.pid, port)

    def subjects(self, triton: str) -> Iterator[Server]:
        """Yield the gateway, then the gateway of `bench.ordinary_gateway` for comparison.

        If the packages that the second gateway needs are not installed, add a note instead.
        """
        with self.gateway(triton) as server:
            yield server
        try:
            with self.ordinary(triton) as server:
                yield server
        except Unmeasured as error:
            self.notes.append(f"ordinary gateway: not measured: {error}")

    @contextlib.contextmanager
    def triton(self, instances: int) -> Iterator[str]:
        """Run a real tritonserver with `instances` synthetic engines. Yield host:port."""
        cores = sorted({*self.cores.upstream, *self.cores.client})
        pace, folder = TRITON_TOKENS_PER_SECOND, self.folder / "triton"
        with real_triton(folder, self.claims, pace, instances, cores) as triton:
            yield triton.grpc


@dataclass(frozen=True)
class Triton:
    """A running tritonserver. `grpc` is the host:port of its gRPC service.

    `pid` is the process id of tritonserver. Its models run in child processes.
    """

    grpc: str
    pid: int


@contextlib.contextmanager
def real_triton(
    folder: Path,
    claims: PortClaims,
    tokens_per_second: float,
    instances: int = 1,
    cores: Iterable[int] | None = None,
) -> Iterator[Triton]:
    """Run a tritonserver with `instances` processes of the synthetic engine.

    The engine sends `tokens_per_second` tokens per second for each request.
    """
    synthetic.build(
        folder / "engine",
        vocab_size=4096,
        tokens_per_second=tokens_per_second,
        first_token_ms=0,
        tokens=[96],  # the letter that the scripted upstream sends
        max_seq_len=MAX_SEQ_LEN,
    )
    parameters: dict[str, Any] = {
        **{name: PARAMETERS[name] for name in PARAMETERS if "instance_count" not in name},
        "triton_max_batch_size": 256,
        "engine_dir": str(folder / "engine"),
        "tokenizer_dir": str(MODEL),
    }
    render(folder / "repository", parameters, ["tensorrt_llm"])
    _set_instances(folder / "repository" / "tensorrt_llm" / "config.pbtxt", instances)
    with started_triton(folder, claims, cores) as triton:
        yield triton


@contextlib.contextmanager
def started_triton(
    folder: Path, claims: PortClaims, cores: Iterable[int] | None = None
) -> Iterator[Triton]:
    """Run a tritonserver with the model repository in `folder`/repository.

    The context is entered when the server is ready.
    """
    ports = Ports(0, 0, *(claims.take_free() for _ in range(3)))
    prefix = region_prefix(folder)
    child = triton_child(ports, folder, prefix, folder / "triton.log")
    start_on(child, cores or os.sched_getaffinity(0))
    try:
        wait_ready(child, f"http://{LOCALHOST}:{ports.triton_http}/v2/health/ready")
        yield Triton(f"{LOCALHOST}:{ports.triton_grpc}", child.pid)
    finally:
        child.terminate()
        child.reap(10.0)
        remove_regions(prefix)


@contextlib.contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Bind the processes that are started in this context to the cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start_on(child: Child, cores: Iterable[int]) -> None:
    with on_cores(cores):
        child.start()


def wait_ready(child: Child, ready: str | None) -> None:
    """Wait until a child process is ready.

    Raises Unmeasured, with the end of the log, if the process exits or is not ready in time.
    """
    deadline = time.monotonic() + READY_WITHIN_S
    while not (answers_ok(ready) if ready else _listens(child.pid)):
        if child.exit_status() is not None:
            raise Unmeasured(child.how_it_ended())
        if time.monotonic() > deadline:
            raise Unmeasured(f"{child.name} is not ready:\n{child.last_lines()}")
        time.sleep(0.05)


def _listens(pid: int) -> bool:
    """Return True if this process listens on any port.

    Connecting to the port would not show which process listens on it.
    """
    sockets = psutil.Process(pid).net_connections()
    return any(each.status == psutil.CONN_LISTEN for each in sockets)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with the checkout on PYTHONPATH, and with `more`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def _set_instances(config: Path, count: int) -> None:
    """Set the number of instances of a model in its config.pbtxt.

    The template for config.pbtxt has one instance, like the template of NVIDIA's
    tensorrtllm_backend. The project's CPU executor supports more instances.
    """
    text = config.read_text(encoding="utf-8")
    if text.count(_ONE_INSTANCE) != 1:
        raise Unmeasured(f"{config}: no {_ONE_INSTANCE!r}")
    config.write_text(text.replace(_ONE_INSTANCE, f"instance_group [ {{ count: {count} "))
