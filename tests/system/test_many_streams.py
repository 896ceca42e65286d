"""Thousands of open streams on one worker: memory per stream, and no delay for active streams."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.pace import IDLE
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import Child
from ops.local_stack.repository import PARAMETERS
from tests.support.cluster import paced_engine
from tests.support.cpu import cpu_seconds
from tests.support.gateway_process import GatewayProcess
from tests.support.metrics import metric
from tests.support.triton_server import MODEL
from triton_repo.render import render

pytestmark = pytest.mark.slow

IDLE_STREAMS, ACTIVE_STREAMS, TOKENS = 2000, 200, 40
PAUSE_MS = 100
# Measured: 26 KiB, without the sockets' buffers in the kernel.
MOST_PER_STREAM = 160 * 1024
OPEN_FILES = 16_384
ROOT = Path(__file__).parents[2]


@contextmanager
def _upstream(folder: Path, claims: PortClaims) -> Iterator[SimpleNamespace]:
    """Yield a scripted Triton whose streams pause for the time that each request's seed gives."""
    engine = paced_engine(folder / "engine", tokens_per_second=10, first_token_ms=0)
    parameters: dict[str, Any] = {
        **{name: PARAMETERS[name] for name in PARAMETERS if "instance_count" not in name},
        "engine_dir": str(engine),
        "tokenizer_dir": str(MODEL),
    }
    render(folder / "repository", parameters, ["tensorrt_llm"])
    port = claims.take_free()
    command = [sys.executable, "-m", "bench.upstream", "--port", str(port)]
    command += ["--repository", str(folder / "repository")]
    child = Child(
        "upstream", command, {**os.environ, "PYTHONPATH": str(ROOT)}, folder / "upstream.log"
    )
    child.start()
    try:
        yield SimpleNamespace(triton_grpc=f"{LOCALHOST}:{port}")
    finally:
        child.terminate()
        child.reap(5.0)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _open(port: int, *, seed: int, tokens: int) -> tuple[Any, Any]:
    """Open a stream and return its reader and writer once its first token has arrived."""
    reader, writer = await asyncio.open_connection(LOCALHOST, port)
    body = {"model": "demo", "prompt": "~", "max_tokens": tokens, "seed": seed}
    data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.readuntil(b"data: ")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return reader, writer


async def _rest(reader: asyncio.StreamReader) -> str:
    """Return the text of all events from the current one to the end of the body."""
    data = b"data: " + await reader.readuntil(b"\r\n0\r\n\r\n")
    events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", data)]
    assert not [event for event in events if "error" in event]
    return "".join(event["choices"][0]["text"] for event in events)


async def _active(port: int) -> None:
    """Read one complete stream and check its text."""
    reader, writer = await _open(port, seed=PAUSE_MS, tokens=TOKENS)
    assert await _rest(reader) == "~" * TOKENS
    writer.close()


async def _cost(gateway: GatewayProcess) -> float:
    """Return the gateway's CPU seconds for `ACTIVE_STREAMS` concurrent streams."""
    before = cpu_seconds(gateway.process.pid)
    await asyncio.gather(*[_active(gateway.port) for _ in range(ACTIVE_STREAMS)])
    return cpu_seconds(gateway.process.pid) - before


@pytest.mark.usefixtures("many_files")
async def test_thousands_of_idle_streams_and_hundreds_that_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        PortClaims() as claims,
        _upstream(tmp_path, claims) as upstream,
        # A long header timeout, because this process may be slow to open so many connections.
        GatewayProcess(
            tmp_path / "g", upstream, log_level="warning", header_timeout=600
        ) as gateway,
    ):
        process, metrics = psutil.Process(gateway.process.pid), gateway.url + "/metrics"
        await _cost(gateway)  # warm-up: pools, caches and compiled code reach their size
        alone = await _cost(gateway)
        before, descriptors = process.memory_info().rss, process.num_fds()
        writers = []
        for _ in range(IDLE_STREAMS // 100):
            opened = [_open(gateway.port, seed=IDLE, tokens=1000) for _ in range(100)]
            writers += [writer for _, writer in await asyncio.gather(*opened)]
        idle = process.memory_info().rss
        assert metric(metrics, "gateway_generations_in_flight") == IDLE_STREAMS
        beside = await _cost(gateway)
        both = process.memory_info().rss
        for writer in writers:
            writer.close()
        async with asyncio.timeout(120):
            while (
                metric(metrics, "gateway_generations_in_flight")
                or process.num_fds() > descriptors + 8
            ):
                await asyncio.sleep(0.1)
        each = (idle - before) / IDLE_STREAMS
        with capsys.disabled():
            print(
                f"\n{before >> 20} MiB without streams, {idle >> 20} MiB with {IDLE_STREAMS} idle "
                f"ones ({each / 1024:.0f} KiB each), {both >> 20} MiB with {ACTIVE_STREAMS} active "
                f"ones too, which cost {beside:.2f} s of CPU time ({alone:.2f} s alone), "
                f"{process.memory_info().rss >> 20} MiB after"
            )
        assert each < MOST_PER_STREAM
        # The gateway checks all connections each second, so a longer run costs slightly more.
        assert beside < 3 * alone
