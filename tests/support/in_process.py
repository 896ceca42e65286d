"""A gateway in the test's event loop, and a byte tokenizer for scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.config.settings import Settings
from gateway.http.server import Server, bind
from gateway.server import GatewayApplication
from tests.support.compared_words import words_compared_once

_READY_WITHIN_S = 300.0


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def ids_of(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


@contextlib.asynccontextmanager
async def running(
    folder: Path, endpoint: str, *, ready: bool = True, **changed: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any, Server]]:
    """Run a gateway in this event loop. Yield a client, the service and the server.

    `ready` waits for the engine. Without it, a single poll precedes the opening of the port, and a
    busy machine may not answer that poll in time.
    """
    fields = {"tokenizer_dir": folder, "model_name": "m", "max_seq_len": 64} | changed
    fields["store_dir"] = folder / "adapters"
    settings = Settings(port=0, triton_grpc=endpoint, **fields)
    with words_compared_once():
        gateway = GatewayApplication(settings)
    server = Server(gateway, settings)
    task = asyncio.create_task(server.serve(bind(settings)))
    try:
        while not server.started:
            assert not task.done(), "the gateway ended at its start"
            await asyncio.sleep(0.01)
        if ready:
            async with asyncio.timeout(_READY_WITHIN_S):
                await gateway.service.replicas.wait_ready()
        port = server.servers[0].sockets[0].getsockname()[1]
        # With an expiry, httpx could close a connection as idle after the loop was blocked for 5 s,
        # although a request was just assigned to it.
        limits = httpx.Limits(keepalive_expiry=None)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            yield client, gateway.service, server
    finally:
        server.should_exit = True
        await task


def metric_of(service: Any, name: str, **labels: str) -> float:
    """Return a sample of the gateway's metrics, or 0 if there is none."""
    return service.metrics.registry.get_sample_value(name, labels) or 0.0
