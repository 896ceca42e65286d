"""Memory that finished requests leave behind in a real Triton: anonymous memory of its process.

    python -m bench.triton_memory [--requests 20000] [--only KIND ...] [--grpcio]

The gateway's client sends requests to the synthetic engine, 16 at a time. There are requests for
one token, for 50 tokens, and requests that the client cancels after the first token. Triton 2.51
leaks some KiB for each HTTP/2 stream that is reset before the response's trailers. The exit code is
1 if the memory grew by 2 MiB or more during the requests of one kind, which is 0.1 KiB for each of
20,000 requests. With only a few hundred requests, the exit code means nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.servers import Triton, real_triton
from gateway.generation.engine_request import Generation
from gateway.generation.options import GenerationParams
from gateway.triton.engine import Engine
from gateway.triton.transport import ABANDON_GRACE_S, ConnectionOptions
from ops.local_stack.ports import PortClaims

TOKENS_PER_SECOND = 20_000
AT_ONCE = 16
MAX_GROWTH_BYTES = 2 << 20
"""Maximum growth in bytes, during all requests of a kind, that does not count as a leak."""
_WARM_UP = 1000
_REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RequestKind:
    """A request for `tokens` tokens.

    The client reads the complete response or, if `disconnects` is True, cancels the request after
    the first token.
    """

    tokens: int
    disconnects: bool = False


KINDS = {
    "one token": RequestKind(1),
    "50 tokens": RequestKind(50),
    "left": RequestKind(2000, disconnects=True),
}


async def measure_growth_bytes(
    triton: Triton,
    kind: RequestKind,
    requests: int,
    connection: ConnectionOptions | None = None,
    rounds: int = 1,
) -> int:
    """Return the growth of `triton`'s anonymous memory in bytes during `requests` requests.

    Before the measurement, up to 1,000 requests warm up the allocator, whose memory grows at first.
    If `rounds` is above 1, `requests` requests are sent in each round, and the result is the growth
    in the round with the least growth. A leak causes growth in every round, the allocator does not.
    """
    engine = Engine(
        triton.grpc,
        "tensorrt_llm",
        vocab_size=4096,
        max_seq_len=None,
        on_stop=lambda _: None,
        on_upload=lambda _: None,
        connection=connection or ConnectionOptions(),
    )
    try:
        await engine.refresh()
        await _ask(engine, kind, min(requests, _WARM_UP))
        found = [_anonymous_bytes(triton.pid)]
        for _ in range(rounds):
            await _ask(engine, kind, requests)
            found.append(_anonymous_bytes(triton.pid))
        return min(after - before for before, after in pairwise(found))
    finally:
        await engine.close()


async def _ask(engine: Engine, kind: RequestKind, requests: int) -> None:
    """Send `requests` requests, and wait until all of their streams have ended or were reset."""
    numbers = iter(range(requests))
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(_ask_each(engine, kind, numbers))
    await asyncio.sleep(ABANDON_GRACE_S)


async def _ask_each(engine: Engine, kind: RequestKind, numbers: Iterator[int]) -> None:
    for number in numbers:
        asked = Generation(
            request_id=f"r{number}",
            prompt_ids=array("i", [1, 2]),
            max_tokens=kind.tokens,
            seed=1,
            params=GenerationParams(),
        )
        deadline = asyncio.get_running_loop().time() + _REQUEST_TIMEOUT_S
        with engine.generate(asked, deadline) as answer:
            first = await answer.first()
            if not (kind.disconnects or first.final):
                await answer.feed_deltas(lambda delta: not delta.final)


def _anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"process {pid} has ended")
    return int(found[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="of each kind")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--grpcio", action="store_true", help="by the reference transport")
    options = parser.parse_args()
    connection = ConnectionOptions(transport="grpcio" if options.grpcio else "http2")
    most = 0
    with (
        tempfile.TemporaryDirectory(prefix="triton-memory-") as folder,
        PortClaims() as claims,
        real_triton(Path(folder), claims, TOKENS_PER_SECOND) as triton,
    ):
        for name in options.only:
            started = time.monotonic()
            work = measure_growth_bytes(triton, KINDS[name], options.requests, connection)
            kept = asyncio.run(work)
            most = max(most, kept)
            took, kib = time.monotonic() - started, kept / 1024 / options.requests
            print(f"{name}: {kib:+.3f} KiB a request ({took:.0f} s)", flush=True)
    return 1 if most >= MAX_GROWTH_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
