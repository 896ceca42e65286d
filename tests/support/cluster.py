"""Several Tritons that a test may kill, freeze and restart, and a load balancer for gateways."""

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
    """Build a model (the demo's by default) with LoRA for the CPU executor."""
    return engine.build(model, folder, lora_target_modules=engine.LLAMA_LORA_MODULES)


def paced_engine(folder: Path, *, tokens_per_second: float, first_token_ms: float) -> Path:
    """Build the synthetic engine, which generates `Z` endlessly at a given rate."""
    return synthetic.build(
        folder,
        vocab_size=4096,
        tokens_per_second=tokens_per_second,
        first_token_ms=first_token_ms,
        tokens=[60],
    )


class TritonReplica:
    """A tritonserver with one model. The ports stay the same after a restart."""

    def __init__(self, folder: Path, make: Callable[[Path], object], claims: PortClaims) -> None:
        """Prepare the Triton's folder. `make` writes the model repository."""
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
        """True if the process ended by itself after `start`."""
        return self._child.is_started and self._child.exit_status() is not None

    def kill(self) -> None:
        """Kill the process immediately, with the processes of its models."""
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
        """Resume the processes of Triton's models, and Triton itself a second later.

        When all were resumed at once, 5 of 144 Tritons with requests crashed, as they do when a
        model gets no CPU time (`triton_server.STARVED`). With this delay, 0 of 192 did. From
        outside, one cannot see whether a model has sent its heartbeat.
        """
        try:
            models = psutil.Process(self._child.pid).children(recursive=True)
            assert models, "a Triton without models"
            for model in models:
                with contextlib.suppress(psutil.NoSuchProcess):  # the process died while frozen
                    model.resume()
            await asyncio.sleep(1.0)
        finally:
            os.killpg(self._child.pid, signal.SIGCONT)

    def count_answered(self) -> float:
        """Return the number of requests answered since Triton's last start."""
        return self.server.metric("nv_inference_request_success", model="tensorrt_llm")


class Tritons:
    """Replicas of one engine. `triton_grpc` is the value of the gateway's setting."""

    def __init__(self, replicas: Sequence[TritonReplica]) -> None:
        self.replicas = list(replicas)
        self.triton_grpc = ",".join(replica.endpoint for replica in replicas)

    def __getitem__(self, index: int) -> TritonReplica:
        return self.replicas[index]

    def wait_idle(self, within_s: float = 60.0) -> None:
        """Wait until no replica's engine has a request."""
        for replica in self.replicas:
            replica.server.wait_active(0, within_s)


def core_repository(engine_dir: Path, **more: Value) -> Callable[[Path], object]:
    """Return a function that writes a repository with only the core model.

    `more` are template parameters.
    """
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
    """Run replicas of the core model. `more` are template parameters."""
    return tritons_of(folder, core_repository(engine_dir, **more), count)


@contextlib.contextmanager
def tritons_of(folder: Path, make: Callable[[Path], object], count: int) -> Iterator[Tritons]:
    """Run `count` replicas and wait until all are ready. A test may leave some of them killed."""
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
    """A proxy that sends each new connection to the next ready gateway, like a TCP load balancer.

    The balancer polls `/health/ready` every `period_s` seconds, and tries the next gateway if one
    refuses a connection. Existing connections stay on their gateway.
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
        """Yield the balancer's URL."""
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
            pass  # cancelled by `running` at its end
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
