"""Several Tritons that a test may kill, freeze and restart, and a balancer before gateways."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import psutil

from ops.commands.up import DEMO_MODEL
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.repository import PARAMETERS
from ops.local_stack.servers import Ports, answers_ok, triton_child
from ops.local_stack.shared_memory import region_prefix, remove_regions
from tests.support.triton_server import Server, wait_ready
from triton_repo.cpu_executor import engine, synthetic
from triton_repo.parameters import Value
from triton_repo.render import render

_CHUNK = 64 * 1024


def demo_engine(folder: Path, model: Path = DEMO_MODEL) -> Path:
    """Build the demo model, or another, for the CPU executor, with LoRA."""
    return engine.build(model, folder, lora_target_modules=engine.LLAMA_LORA_MODULES)


def paced_engine(folder: Path, *, tokens_per_second: float, first_token_ms: float) -> Path:
    """Build the synthetic engine with known times, which generates `Z` endlessly."""
    return synthetic.build(
        folder,
        vocab_size=4096,
        tokens_per_second=tokens_per_second,
        first_token_ms=first_token_ms,
        tokens=[60],
    )


class TritonReplica:
    """A tritonserver with one model, on ports that remain after a restart."""

    def __init__(self, folder: Path, make: Callable[[Path], object], claims: PortClaims) -> None:
        """Prepare it; `make` writes the repository into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        make(folder / "repository")
        self._ports = Ports(0, 0, *(claims.take_free() for _ in range(3)))
        self._prefix = region_prefix(folder)
        self._child = triton_child(self._ports, folder, self._prefix, folder / "triton.log")
        self._http = f"{LOCALHOST}:{self._ports.triton_http}"
        self.endpoint = f"{LOCALHOST}:{self._ports.triton_grpc}"
        self.server = Server(self._ports)

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self) -> None:
        self._child.start()

    def wait_ready(self) -> None:
        wait_ready(self._child, self._http, self._ports.triton_metrics)

    def is_ready(self) -> bool:
        return answers_ok(f"http://{self._http}/v2/health/ready")

    @property
    def has_ended(self) -> bool:
        """True if it ended by itself after `start`."""
        return self._child.is_started and self._child.exit_status() is not None

    def kill(self) -> None:
        """Kill it immediately, with the processes of its models."""
        self._child.reap(0.0)
        remove_regions(self._prefix)

    def end(self) -> None:
        if self._child.is_started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGCONT)
        self._child.terminate()
        self._child.reap(10.0)
        remove_regions(self._prefix)

    def freeze(self) -> None:
        os.killpg(self._child.pid, signal.SIGSTOP)

    async def thaw(self) -> None:
        """Resume the processes of its models first, a second before Triton.

        When all resumed at once, 5 of 144 Tritons with requests died, as they do when a model gets
        no CPU time (`triton_server.STARVED`); of 192 with this delay, none. Whether a model has
        sent its sign of life is not visible from outside.
        """
        try:
            models = psutil.Process(self._child.pid).children(recursive=True)
            assert models, "a Triton without models"
            for model in models:
                with contextlib.suppress(psutil.NoSuchProcess):  # it died while it was frozen
                    model.resume()
            await asyncio.sleep(1.0)
        finally:
            os.killpg(self._child.pid, signal.SIGCONT)

    def count_answered(self) -> float:
        """Return the number of requests answered since its last start."""
        return self.server.metric("nv_inference_request_success", model="tensorrt_llm")


class Tritons:
    """Replicas of one engine. `triton_grpc` is for a gateway's setting."""

    def __init__(self, replicas: Sequence[TritonReplica]) -> None:
        self.replicas = list(replicas)
        self.triton_grpc = ",".join(replica.endpoint for replica in replicas)

    def __getitem__(self, index: int) -> TritonReplica:
        return self.replicas[index]

    def wait_idle(self, within_s: float = 60.0) -> None:
        """Wait until no engine has a request."""
        for replica in self.replicas:
            replica.server.wait_active(0, within_s)


def core_repository(engine_dir: Path, **more: Value) -> Callable[[Path], object]:
    """Return a writer of a repository with only the core model; `more` are template parameters."""
    parameters: dict[str, Value] = {
        **{name: PARAMETERS[name] for name in PARAMETERS if "instance_count" not in name},
        "max_tokens_in_paged_kv_cache": 65536,
        "engine_dir": str(engine_dir),
        "tokenizer_dir": str(DEMO_MODEL),
        **more,
    }
    return lambda repository: render(repository, parameters, ["tensorrt_llm"])


def tritons(
    folder: Path, engine_dir: Path, count: int = 2, **more: Value
) -> contextlib.AbstractContextManager[Tritons]:
    """Run `tritons_of` with the core model; `more` are template parameters."""
    return tritons_of(folder, core_repository(engine_dir, **more), count)


@contextlib.contextmanager
def tritons_of(folder: Path, make: Callable[[Path], object], count: int) -> Iterator[Tritons]:
    """Run replicas, ready inside; a test may kill some without restarting them."""
    with PortClaims() as claims:
        replicas = [TritonReplica(folder / f"triton-{n}", make, claims) for n in range(count)]
        try:
            for replica in replicas:
                replica.start()
            for replica in replicas:
                replica.wait_ready()
            yield Tritons(replicas)
        finally:
            for replica in replicas:
                replica.end()


class Balancer:
    """A proxy that sends each new connection to the next ready gateway, like a TCP balancer.

    It polls `/health/ready` every `period_s` seconds and tries the next gateway if one refuses a
    connection. Existing connections stay where they are.
    """

    def __init__(self, ports: Sequence[int], period_s: float = 0.2) -> None:
        self.ports = list(ports)
        self.taken: dict[int, int] = dict.fromkeys(ports, 0)
        self._ready: set[int] = set()
        self._period_s = period_s
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Yield its address as a URL."""
        server = await asyncio.start_server(self._serve, LOCALHOST, 0)
        watch = asyncio.create_task(self._watch())
        try:
            yield f"http://{LOCALHOST}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in [watch, *self._tasks]:
                task.cancel()
            await asyncio.gather(watch, *self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for port in self.ports:
                url = f"http://{LOCALHOST}:{port}/health/ready"
                ready = await asyncio.to_thread(answers_ok, url)
                (self._ready.add if ready else self._ready.discard)(port)
            await asyncio.sleep(self._period_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            upstream = await self._connect()
            if upstream is not None:
                await asyncio.gather(_copy(reader, upstream[1]), _copy(upstream[0], writer))
        except asyncio.CancelledError:
            pass  # by `running`, at its end
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        self._turn += 1
        order = [self.ports[(self._turn + n) % len(self.ports)] for n in range(len(self.ports))]
        for port in sorted(order, key=lambda port: port not in self._ready):
            with contextlib.suppress(OSError):
                connection = await asyncio.open_connection(LOCALHOST, port)
                self.taken[port] += 1
                return connection
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
