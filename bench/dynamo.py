"""Launcher of the frontend of NVIDIA Dynamo, for the comparison of gateways.

The frontend is installed from wheels. Its worker is scripted (see `bench.dynamo_worker`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from bench.peer import Peer
from bench.servers import MODEL, Bench, Server
from bench.wheels import importable
from ops.local_stack.ports import LOCALHOST

REQUIREMENTS = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1", "msgspec>=0.19,<1")
_MODULES = ("dynamo.frontend.main", "dynamo.llm")


@contextlib.contextmanager
def dynamo(bench: Bench) -> Iterator[Peer]:
    """Run Dynamo without etcd and NATS, as its documentation describes, with its fastest tokenizer.

    Dynamo finds its worker through files, and talks to the worker over TCP in a private protocol.
    The benchmark has no client for this protocol, so it cannot measure the worker without Dynamo.
    The time that Dynamo adds to a first token is therefore unknown.
    """
    path = importable(bench, "dynamo", REQUIREMENTS, _MODULES)
    port, folder = bench.claims.take_free(), bench.folder / "dynamo"
    env = {
        "PYTHONPATH": path,
        "HOME": str(folder),  # set HOME, because Dynamo stores a copy of the model's card there
        "DYN_FILE_KV": str(folder / "found"),
        "DYN_TCP_RPC_HOST": LOCALHOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": LOCALHOST,
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    folder.mkdir()
    scripted = [sys.executable, "-m", "bench.dynamo_worker", "--model", str(MODEL)]
    scripted += ["--name", "demo", "--events", str(bench.events)]
    command = [sys.executable, "-m", "dynamo.frontend", "--http-host", LOCALHOST]
    command += ["--http-port", str(port), "--discovery-backend", "file", "--request-plane", "tcp"]
    command += ["--tokenizer", "fastokens"]
    ready = f"http://{LOCALHOST}:{port}/v1/models/demo"
    with (
        bench.running("dynamo-worker", scripted, None, bench.cores.upstream, **env),
        bench.running("dynamo", command, ready, bench.cores.gateway, **env) as child,
    ):
        yield Peer(Server("Dynamo 1.6.1", child.pid, port, live="/live"), None)
