"""Launcher of the gateway SMG in gRPC mode, for the comparison of gateways.

SMG is installed from its wheel. Its TensorRT-LLM worker is scripted (see `bench.smg_worker`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from bench.pace import BURST
from bench.peer import Peer, Straight
from bench.servers import MODEL, Bench, Server
from bench.wheels import importable
from gateway.triton.request import varint
from ops.local_stack.ports import LOCALHOST

REQUIREMENTS = ("smg==1.13.0", "smg-grpc-proto==0.4.28", "setproctitle>=1.3,<2")
_GENERATE = "/trtllm.TrtllmService/Generate"
_MODULES = ("smg", "smg_grpc_proto.generated.trtllm_service_pb2", "setproctitle")


@contextlib.contextmanager
def smg(bench: Bench) -> Iterator[Peer]:
    """Run SMG with the documented options for a single worker.

    SMG logs only warnings. Its caches of tokenized texts are off, which is the default. SMG does
    not pass the parameter `seed` on to its worker, so `top_k` selects the pace instead.
    """
    path = importable(bench, "smg", REQUIREMENTS, _MODULES)
    worker, port, metrics = (bench.claims.take_free() for _ in range(3))
    scripted = [sys.executable, "-m", "bench.smg_worker", "--port", str(worker), "--model", "demo"]
    scripted += ["--events", str(bench.events)]
    command = [sys.executable, "-m", "smg", "launch", "--host", LOCALHOST, "--port", str(port)]
    command += ["--worker-urls", f"grpc://{LOCALHOST}:{worker}", "--model-path", str(MODEL)]
    command += ["--prometheus-host", LOCALHOST, "--prometheus-port", str(metrics)]
    command += ["--policy", "round_robin", "--history-backend", "none", "--log-level", "warn"]
    ready = f"http://{LOCALHOST}:{port}/readiness"
    with (
        bench.running("smg-worker", scripted, None, bench.cores.upstream, PYTHONPATH=path),
        bench.running("smg", command, ready, bench.cores.gateway, PYTHONPATH=path) as child,
    ):
        server = Server("SMG 1.13.0", child.pid, port, live="/liveness", script="top_k")
        yield Peer(server, Straight(f"{LOCALHOST}:{worker}", _GENERATE, _request))


def _request(request_id: str, ids: list[int]) -> bytes:
    """Return a serialized GenerateRequest for one token.

    The message and its field numbers are defined in trtllm_service.proto.
    """
    tokenized = _field(2, b"".join(map(varint, ids)))
    sampling = bytes([2 << 3]) + varint(BURST)
    one_token_streamed = bytes([5 << 3, 1, 6 << 3, 1])
    return (
        _field(1, request_id.encode())
        + _field(2, tokenized)
        + _field(3, sampling)
        + one_token_streamed
    )


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(value)) + value
