"""Three real llmapi Tritons, each with a disk and an agent, one gateway and one Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from adapters.peft_files import peft_files
from ops.commands.up import DEMO_MODEL
from tests.chaos.adapters import Content, generated_contents
from tests.support.cluster import tritons_of
from tests.support.gateway_process import GatewayProcess
from tests.support.generated_adapters import base_model, convert_folder
from tests.support.redis_server import RedisServer, running_redis
from triton_repo.cpu_executor import engine
from triton_repo.llmapi_repository import render_llmapi

REPLICAS = 3
ADMIN_KEY = "the-admin-key-of-three-tritons-with-disks"
# Fewer than the adapters, so that an engine must load evicted adapters again from disk.
_MAX_CPU_LORAS = 8
_MAX_RANK = 16
_PATIENCE_S = 600


class Agent:
    """The `gateway lora agent` process of one Triton."""

    def __init__(self, folder: Path, replica: str, redis_url: str, max_bytes: int) -> None:
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        self._log = folder / "agent.log"
        self._command = [sys.executable, "-m", "ops", "lora", "agent", str(self.disk)]
        self._command += ["--replica", replica, "--max-bytes", str(max_bytes)]
        inherited = {name: value for name, value in os.environ.items() if "GATEWAY_" not in name}
        self._env = {**inherited, "GATEWAY_REDIS_URL": redis_url, "GATEWAY_MODEL_NAME": "demo"}
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._env, stderr=log)

    def kill(self) -> None:
        """Kill the agent with SIGKILL."""
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.kills += 1

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def held(self) -> set[str]:
        """Digests of the complete versions on the disk."""
        return {path.name for path in self.disk.iterdir() if not path.name.startswith(".")}

    @property
    def nbytes(self) -> int:
        """Size of all files on the disk in bytes, including incomplete ones."""
        total = 0
        for folder, _, names in os.walk(self.disk):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total


@dataclass
class World:
    """The servers. `contents` have distinct answers; `bound` is each disk's limit in bytes."""

    redis: RedisServer
    agents: list[Agent]
    gateway: GatewayProcess
    contents: list[tuple[Content, str]]
    bound: int

    def admin(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.gateway.admin_port}/v1",
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
            timeout=_PATIENCE_S,
        )


@contextlib.contextmanager
def running_world(folder: Path, versions: int, room: int) -> Iterator[World]:
    """Yield the servers, ready except for the agents, which are not started.

    Each disk has space for `room` versions.
    """
    model = engine.build(
        DEMO_MODEL,
        folder / "engine",
        lora_target_modules=engine.LLAMA_LORA_MODULES,
        gather_generation_logits=True,  # shows how clear an answer is
    )
    contents = list(generated_contents(folder / "sources", model, versions).items())
    size = peft_files(convert_folder(contents[0][0].folder, model), base_model(model)).nbytes
    # Agents estimate a version's size slightly too high, so the limit has almost one more version.
    bound = (room + 1) * size - 1
    config = engine.load_config(DEMO_MODEL)
    make = partial(
        render_llmapi,
        parameters={
            "model": str(DEMO_MODEL),
            "max_seq_len": config.max_seq_len,
            "max_cpu_loras": _MAX_CPU_LORAS,
            "max_lora_rank": _MAX_RANK,
            "lora_target_modules": ",".join(engine.lora_modules(DEMO_MODEL)),
        },
    )
    with running_redis() as redis, tritons_of(folder, make, REPLICAS) as three:
        agents = [
            Agent(folder / f"agent-{n}", replica.endpoint, redis.url, bound)
            for n, replica in enumerate(three.replicas)
        ]
        settings = {
            "redis_url": redis.url,
            "admin_port": 0,
            "admin_key": ADMIN_KEY,
            "max_seq_len": config.max_seq_len,
            "replica_in_flight": 8,
            "adapter_wait": _PATIENCE_S,
            "queue_timeout": _PATIENCE_S,
            "max_expected_wait": _PATIENCE_S,
            "request_timeout": _PATIENCE_S,
        }
        try:
            with GatewayProcess(folder / "gateway", three, **settings) as gateway:
                yield World(redis, agents, gateway, contents, bound)
        finally:
            for agent in agents:
                agent.end()


class Watched:
    """The maximum use of each disk, measured repeatedly by a thread."""

    def __init__(self, agents: list[Agent]) -> None:
        self._agents = agents
        self._ended = threading.Event()
        self.most = [0] * len(agents)

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.most = [
                max(most, agent.nbytes) for most, agent in zip(self.most, self._agents, strict=True)
            ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()


def until(met: Callable[[], object], what: str) -> None:
    """Wait for the condition. The time limit only ends a run that hangs."""
    ended = threading.Event()
    for _ in range(10 * _PATIENCE_S):
        if met():
            return
        ended.wait(0.1)
    raise AssertionError(f"it does not come about: {what}")
