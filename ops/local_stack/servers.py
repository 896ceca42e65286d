"""Commands of the stack's three servers, and their readiness probes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from ops.local_stack.binaries import find_redis_server, find_triton_server
from ops.local_stack.ports import LOCALHOST
from ops.local_stack.process import Child
from ops.local_stack.repository import REPOSITORY
from ops.local_stack.state import admin_key

PROBE_TIMEOUT = 2.0  # seconds
# Seconds after SIGTERM in which a server may finish its running requests. The values are short,
# because the complete stack must stop within 15 s.
GATEWAY_GRACE = 3
TRITON_GRACE = 3
MODEL_PROCESS = "triton_python_backend_stub"
"""Name of the process in which Triton runs an instance of a Python model."""


@dataclass(frozen=True)
class Ports:
    """The TCP ports on 127.0.0.1 that a stack uses."""

    gateway: int
    redis: int
    triton_http: int
    triton_grpc: int
    triton_metrics: int


def redis_child(port: int, data: Path, log: Path) -> Child:
    """Return the child process for redis-server, without starting it.

    Redis logs each write to a file, so acknowledged writes are not lost if the process is killed.
    """
    data.mkdir(exist_ok=True)
    command = [
        *(str(find_redis_server()), "--bind", LOCALHOST, "--port", str(port)),
        *("--dir", str(data.absolute()), "--save", "", "--appendonly", "yes"),
        *("--lazyfree-lazy-expire", "yes"),
    ]
    return Child("redis", command, os.environ, log)


def triton_child(ports: Ports, state_dir: Path, shm_prefix: str, log: Path, *options: str) -> Child:
    """Return the child process for tritonserver, without starting it.

    Triton serves the model repository in `state_dir`.

    Args:
        ports: ports of the stack.
        state_dir: the stack's state folder.
        shm_prefix: prefix of the names of the server's shared memory files.
        log: the log file.
        options: further options of tritonserver.
    """
    server = find_triton_server(state_dir / "backends")
    command = [
        str(server.executable),
        *server.arguments,
        f"--model-repository={(state_dir / REPOSITORY).absolute()}",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        # Allow 120 s: on a busy machine, a model's process needs more time than the default of 30
        # s.
        "--backend-config=python,stub-timeout-seconds=120",
        f"--exit-timeout-secs={TRITON_GRACE}",
        *(f"--{kind}-address={LOCALHOST}" for kind in ("http", "grpc", "metrics")),
        f"--http-port={ports.triton_http}",
        f"--grpc-port={ports.triton_grpc}",
        f"--metrics-port={ports.triton_metrics}",
        *options,
    ]
    # Use one BLAS thread, because the CPU executor's matrices are small. With 32 requests on a
    # 2-core machine, one thread generates 2,500 tokens/s. Two threads generate only 2,250 tokens/s,
    # and leave less CPU time for the gateway.
    env = {"OPENBLAS_NUM_THREADS": "1"} | server.env
    return Child("triton", command, env, log)


def loading(models: Sequence[str]) -> list[str]:
    """Return the options of tritonserver that load only `models`; [] if `models` is empty."""
    only = [f"--load-model={name}" for name in models]
    return ["--model-control-mode=explicit", *only] if only else []


@dataclass(frozen=True)
class ServedModel:
    """The model and the adapters that the gateway serves.

    Attributes:
        model_name: the base model's name for clients.
        tokenizer: folder of the base model's tokenizer.
        adapters: PEFT folders by adapter name.
        max_seq_len: limit of prompt plus output in tokens for the llmapi repository's model, which
            does not report it. None for other models.
        in_flight: number of requests to send to Triton at once; used only if `max_seq_len` is set.
        triton_model: name in Triton of the model with the engine; None if the gateway's settings
            define it.
    """

    model_name: str
    tokenizer: Path
    adapters: Mapping[str, Path]
    max_seq_len: int | None = None
    in_flight: int = 1
    triton_model: str | None = None


def gateway_child(ports: Ports, served: ServedModel, state_dir: Path, log: Path) -> Child:
    """Return the child process for the stack's gateway, without starting it.

    GATEWAY_ variables in the environment of this process are passed to the gateway.
    """
    adapters = {name: str(folder.absolute()) for name, folder in served.adapters.items()}
    env = os.environ | {
        # Let GATEWAY_HOST replace the loopback address. In a container, a server on loopback is not
        # reachable through a published port. The address must include loopback, such as 0.0.0.0,
        # because the readiness probes connect to loopback.
        "GATEWAY_HOST": os.environ.get("GATEWAY_HOST", LOCALHOST),
        "GATEWAY_PORT": str(ports.gateway),
        "GATEWAY_TRITON_GRPC": f"{LOCALHOST}:{ports.triton_grpc}",
        "GATEWAY_REDIS_URL": f"redis://{LOCALHOST}:{ports.redis}/0",
        "GATEWAY_MODEL_NAME": served.model_name,
        "GATEWAY_TOKENIZER_DIR": str(served.tokenizer.absolute()),
        "GATEWAY_STORE_DIR": str((state_dir / "adapters").absolute()),
        "GATEWAY_ADAPTERS": json.dumps(adapters),
        "GATEWAY_ADMIN_KEY": admin_key(state_dir),
        "GATEWAY_SHUTDOWN_GRACE": str(GATEWAY_GRACE),
    }
    if served.triton_model is not None:
        env["GATEWAY_TRITON_MODEL"] = served.triton_model
    if served.max_seq_len is not None:
        folders = state_dir / "adapters" / quote(served.model_name, safe="") / "peft"
        own = {
            "GATEWAY_MAX_SEQ_LEN": str(served.max_seq_len),
            "GATEWAY_REPLICA_IN_FLIGHT": str(served.in_flight),
        }
        env = own | env
        env["GATEWAY_PEFT_DIR"] = str(folders.absolute())
    return Child("gateway", [sys.executable, "-m", "gateway"], env, log)


def answers_ok(url: str) -> bool:
    """Return True if a GET of `url` returns status 200. No proxy is used."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=PROBE_TIMEOUT)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def answers_ping(port: int) -> bool:
    """Return True if the Redis on `port` answers PING.

    Redis refuses PING while it loads its data.
    """
    try:
        with socket.create_connection((LOCALHOST, port), timeout=PROBE_TIMEOUT) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
