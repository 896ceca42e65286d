"""Launcher of Dynamo's frontend, from its wheels, connected to a scripted worker."""

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
    """Run Dynamo as documented for operation without etcd and NATS, with its fastest tokenizer.

    Dynamo finds its worker through files, and talks to it over TCP in a private protocol. The
    worker cannot be measured without Dynamo, so the time that Dynamo adds to a first token is
    unknown.
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
