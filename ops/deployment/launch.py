"""The command line and environment that start tritonserver on a TensorRT-LLM engine.

Arguments and variables are the same as in tensorrtllm_backend's `scripts/launch_triton_server.py`.
Documentation of deployments with that script therefore applies here, too. The releases of the
script differ only in the order of the arguments.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

DEFAULT_EXECUTABLE = "/opt/tritonserver/bin/tritonserver"  # in NVIDIA's containers
CORE_MODEL = "tensorrt_llm"
LOG_FILE = "triton_log.txt"
SHM_PREFIX = "prefix"
LLMAPI_LAUNCH = "trtllm-llmapi-launch"
"""TensorRT-LLM's program that mpirun runs on each rank if the LLM API needs several ranks.

Its arguments are tritonserver's command line. On rank 0, the program runs this command line. On the
other ranks, it runs a worker of the LLM API.
"""

Release = Literal["v0.17", "v0.19"]


class Mode(Enum):
    """The way in which the ranks of an engine are started and controlled.

    LEADER: each rank of the engine is a tritonserver process. Rank 0 serves.
    SPAWN: one tritonserver, the orchestrator, starts worker processes for each model.
    PRESPAWNED: rank 0 is the orchestrator. Other ranks are workers of the models, assigned by
        each model's parameter participant_ids.
    LLMAPI: one tritonserver serves the llmapi repository. The LLM API starts the workers; with
        `world_size` above 1, `LLMAPI_LAUNCH` starts them.
    """

    LEADER = "leader"
    SPAWN = "orchestrator, spawning"
    PRESPAWNED = "orchestrator, pre-spawned"
    LLMAPI = "LLM API"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of tritonserver.

    Attributes:
        model_repo: the model repository.
        world_size: number of ranks, one process each. In the mode `Mode.LLMAPI`, 1 means a launch
            without MPI.
        core_models: names of the models that all ranks load; rank 0 loads the other models too.
        grpc_port, http_port, metrics_port: ports, which all ranks get but only rank 0 opens.
        log_file: file for a verbose log of rank 0; None leaves Triton's log as it is.
        mpi: True if mpirun starts the ranks.
        oversubscribe: True lets mpirun start more ranks than it has slots, by default CPU cores.
        multimodal_pool: size in bytes of GPU 0's CUDA memory pool in rank 0; 0 for the default.
        gpus_without_pool: in the mode `Mode.SPAWN`, number of GPUs on which Triton reserves no CUDA
            memory pool, because the workers need the memory. None leaves the default pools.
        exit_timeout: seconds that Triton gives running requests at exit; None for its default.
        release: the release of launch_triton_server.py whose argument order is used.
        more: further arguments of tritonserver, for each rank.
    """

    model_repo: str
    world_size: int = 1
    core_models: tuple[str, ...] = (CORE_MODEL,)
    tritonserver: str = DEFAULT_EXECUTABLE
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    mode: Mode = Mode.LEADER
    log_file: str | None = None
    mpi: bool = True
    oversubscribe: bool = False
    multimodal_pool: int = 0
    gpus_without_pool: int | None = None
    exit_timeout: int | None = None
    release: Release = "v0.17"
    more: tuple[str, ...] = ()

    @property
    def servers(self) -> int:
        """Number of ranks that run tritonserver."""
        return 1 if self.mode == Mode.LLMAPI else self.world_size


def command(launch: Launch) -> list[str]:
    """Return the command line that starts all ranks of the launch."""
    server = [launch.tritonserver, *rank_arguments(launch, 0)]
    is_llmapi = launch.mode == Mode.LLMAPI
    if not launch.mpi or (is_llmapi and launch.world_size == 1):
        return server
    parts = ["mpirun", "--allow-run-as-root"]
    if launch.oversubscribe:
        parts.append("--oversubscribe")
    if is_llmapi:
        return [*parts, "-n", str(launch.world_size), LLMAPI_LAUNCH, *server]
    for rank in range(launch.world_size):
        parts += ["-n", "1", launch.tritonserver, *rank_arguments(launch, rank), ":"]
    return parts


def rank_arguments(launch: Launch, rank: int) -> list[str]:
    """Return the arguments of tritonserver for one rank."""
    return [*shared_arguments(launch, is_leader=rank == 0), shm_argument(str(rank))]


def shared_arguments(launch: Launch, *, is_leader: bool) -> list[str]:
    """Return tritonserver's arguments for rank 0, the leader, or for any other rank.

    The last argument is missing, because it contains the rank. `shm_argument` returns it.
    """
    ports = [
        f"--grpc-port={launch.grpc_port}",
        f"--http-port={launch.http_port}",
        f"--metrics-port={launch.metrics_port}",
    ]
    log = [] if launch.log_file is None else ["--log-verbose=3", f"--log-file={launch.log_file}"]
    parts = [f"--model-repository={launch.model_repo}"]
    if launch.exit_timeout is not None:
        parts.append(f"--exit-timeout-secs={launch.exit_timeout}")
    if launch.release == "v0.19":
        parts += ports
    if is_leader:
        parts += log
        if launch.multimodal_pool:
            parts.append(f"--cuda-memory-pool-byte-size=0:{launch.multimodal_pool}")
    else:
        parts.append("--model-control-mode=explicit")
        parts += [f"--load-model={name}" for name in launch.core_models]
    if launch.mode == Mode.SPAWN and launch.gpus_without_pool is not None:
        parts += ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
        gpus = range(launch.gpus_without_pool)
        parts += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in gpus]
    return [*parts, *launch.more, *ports, "--disable-auto-complete-config"]


def shm_argument(rank: str) -> str:
    """Return the argument that sets a rank's prefix for the names of shared memory files.

    Ranks with equal prefixes would overwrite each other's memory.
    """
    return f"--backend-config=python,shm-region-prefix-name={SHM_PREFIX}{rank}_"


def environment(launch: Launch) -> dict[str, str]:
    """Return the environment variables that set TensorRT-LLM's orchestrator mode."""
    if launch.mode in (Mode.LEADER, Mode.LLMAPI):
        return {}
    return {
        "TRTLLM_ORCHESTRATOR": "1",
        "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1" if launch.mode == Mode.SPAWN else "0",
    }


def shell_text(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return a command and its environment variables in shell syntax, with a line per rank."""
    lines: list[list[str]] = [[f"{name}={shlex.quote(value)}" for name, value in variables.items()]]
    for part in command:
        if part == "-n":
            lines.append([])
        lines[-1].append(shlex.quote(part))
    return " \\\n  ".join(" ".join(line) for line in lines)


def count_gpus(environ: Mapping[str, str]) -> int | None:
    """Return the value for `Launch.gpus_without_pool`: the number of GPUs of this machine.

    Return 0 if nvidia-smi fails. Return None, which leaves Triton's default pools, if Triton is
    24.06 or older, or its version is unknown. The version is in the environment variable
    NVIDIA_TRITON_SERVER_VERSION, which NVIDIA's containers set.
    """
    version = environ.get("NVIDIA_TRITON_SERVER_VERSION", "").split(".")
    if len(version) < 2 or not all(part.isdecimal() for part in version[:2]):
        return None
    if (int(version[0]), int(version[1])) <= (24, 6):
        return None
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return len(listed.stdout.splitlines())
