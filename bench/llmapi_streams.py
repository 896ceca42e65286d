"""Survival test of Triton with llmapi streams, for this project's model and one that polls.

    python -m bench.llmapi_streams [--chats 5000] [--concurrency 32]

Two versions of model.py are tested: this project's, and one that polls for ended requests, as
TensorRT-LLM's does. Each version is tested with and without streaming, with a new Triton process
that serves the synthetic engine. Chats go through `gateway serve`. A test ends early if Triton
dies. In the last row of the table (polling with streaming), Triton may die, as with TensorRT-LLM's
own model.py. The exit code is 1 if a chat failed or Triton died in any other row.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import report
from bench.load import Clients
from bench.machine import cores_for
from bench.servers import CHAT, MAX_SEQ_LEN, MODEL, Bench, started_triton
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import adopt_orphans
from triton_repo.cpu_executor import synthetic
from triton_repo.llmapi_repository import render_llmapi

_TOKENS = 12
_TOKENS_PER_S = 500.0
_PATIENCE_S = 60.0
ROWS = [(polls, stream) for polls in (False, True) for stream in (False, True)]


class Chats:
    """Client that sends chats in concurrent closed loops, and stops if Triton dies.

    `answered` and `failed` are the numbers of its chats so far.
    """

    def __init__(self, port: int, triton: int, *, stream: bool) -> None:
        self._port = port
        self._triton = psutil.Process(triton)
        self._stream = stream
        self.answered = self.failed = self._asked = 0

    @property
    def triton_lives(self) -> bool:
        """True while the tritonserver process is running."""
        return self._triton.is_running() and self._triton.status() != psutil.STATUS_ZOMBIE

    async def run(self, count: int, concurrency: int) -> None:
        url = f"http://{LOCALHOST}:{self._port}"
        limits = httpx.Limits(max_connections=concurrency)
        async with (
            httpx.AsyncClient(
                base_url=url, timeout=_PATIENCE_S, limits=limits, trust_env=False
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(concurrency):
                tasks.create_task(self._loop(client, count))

    async def _loop(self, client: httpx.AsyncClient, count: int) -> None:
        while self._asked < count and self.triton_lives:
            self._asked += 1
            if await self._is_answered(client, self._asked):
                self.answered += 1
            else:
                self.failed += 1

    async def _is_answered(self, client: httpx.AsyncClient, number: int) -> bool:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": f"Chat {number}"}],
            "max_tokens": _TOKENS,
            "stream": self._stream,
        }
        try:
            answer = await client.post(CHAT, json=body)
        except httpx.HTTPError:
            return False
        whole = '"finish_reason":"length"' in answer.text
        return answer.status_code == 200 and whole and answer.text.count(" one") == _TOKENS


def _row(
    bench: Bench, *, polls: bool, stream: bool, count: int, concurrency: int
) -> dict[str, Any]:
    name = f"{'polling' if polls else 'ours'}-{'true' if stream else 'false'}"
    folder = bench.folder / name
    parameters: dict[str, Any] = {"model": str(bench.folder / "engine")}
    render_llmapi(folder / "repository", parameters | {"polls_ended_requests": polls})
    limits = {
        "GATEWAY_MAX_SEQ_LEN": str(MAX_SEQ_LEN),
        "GATEWAY_REPLICA_IN_FLIGHT": str(concurrency),
    }
    with (
        started_triton(folder, bench.claims) as triton,
        bench.gateway(triton.grpc, name=name, settings=limits) as gateway,
    ):
        chats = Chats(gateway.port, triton.pid, stream=stream)
        began = time.monotonic()
        asyncio.run(chats.run(count, concurrency))
        return {
            "model.py": "polls as upstream's" if polls else "this project's",
            "streaming": str(stream).lower(),
            "chats": count,
            "answered": chats.answered,
            "failed": chats.failed,
            "same process of Triton": "yes" if chats.triton_lives else "no: it died",
            "seconds": time.monotonic() - began,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    adopt_orphans()
    cores = cores_for(1)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="llmapi-streams-") as name,
        PortClaims() as claims,
        contextlib.closing(Clients(cores.client)) as clients,
    ):
        bench = Bench(
            folder=Path(name), claims=claims, cores=cores, clients=clients, seconds=0, quick=False
        )
        engine = synthetic.build(
            bench.folder / "engine",
            vocab_size=4096,
            tokens=[487],  # the token " one"
            first_token_ms=0,
            tokens_per_second=_TOKENS_PER_S,
            max_batch_size=options.concurrency,
            max_seq_len=MAX_SEQ_LEN,
        )
        (engine / "tokenizer.json").symlink_to(MODEL / "tokenizer.json")
        for polls, stream in ROWS:
            how = {"count": options.chats, "concurrency": options.concurrency}
            rows.append(_row(bench, polls=polls, stream=stream, **how))
            print(report.table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(report.table(rows))
    return int(any(row["answered"] != row["chats"] for row in rows[:-1]))


if __name__ == "__main__":
    sys.exit(main())
