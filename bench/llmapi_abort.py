"""Time until an llmapi engine is idle after an abort, in every phase of a request.

    python -m bench.llmapi_abort [--rounds 12] [--release main 1.3 1.2]

A real Triton serves the synthetic engine through the llmapi repository, with the behaviour of three
TensorRT-LLM releases. The engine runs one request at a time. It sends the first token after 100 ms,
then one every 20 ms. The measured request is aborted in one of four ways:

- `client leaves`, `deadline`, `stop string`: the request goes through `gateway serve`. It ends
  because its client disconnects, its deadline passes, or a stop string is generated.
- `stop request`: the request goes straight to Triton, and a stop request ends it.

A second request waits in the engine's queue, and reports the time at which the engine started it.
The result is the time in milliseconds from the abort to this start. With a stop string, the abort
is the time of the token that completes the string. In the phase `queued`, a third request occupies
the engine, and is stopped at the time of the abort. The exit code is 1 if a median is above 300 ms,
or if the gateway does not count one end per request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from bench import report
from bench.load import Clients
from bench.machine import cores_for
from bench.servers import MAX_SEQ_LEN, MODEL, Bench, started_triton
from gateway.triton.client import TritonClient
from gateway.triton.direct import DirectModel, replies
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import adopt_orphans
from triton_repo.cpu_executor import synthetic
from triton_repo.llmapi_repository import MAIN, V1_2, V1_3, render_llmapi

WITHIN_MS = 300.0
_FIRST_S, _BEAT_S = 0.1, 0.02
_ENDLESS, _SHORT = 100_000, 20
_FOLLOWS_S = 0.02
_PATIENCE_S = 60.0
_ONE, _TWO, _THE = 487, 1346, 317
# The engine's output: " one" ten times, " two" nine times, then " the". The stop string " one" ends
# a request at its first token, " two" in the middle, and " the" at its last token.
_SCRIPT = [_ONE] * 10 + [_TWO] * 9 + [_THE]
HOW = ("client leaves", "deadline", "stop request", "stop string")
# Seconds from the request to its abort.
PHASES = {
    "queued": 0.06,
    "before the first token": 0.06,
    "in the middle": _FIRST_S + 10 * _BEAT_S,
    "at the last token": _FIRST_S + (_SHORT - 1.5) * _BEAT_S,
}
_STOPS = {
    "before the first token": (" one", _FIRST_S),
    "in the middle": (" two", _FIRST_S + 10 * _BEAT_S),
    "at the last token": (" the", _FIRST_S + 19 * _BEAT_S),
}


class Deployment:
    """A gateway, and a Triton with the llmapi model of one TensorRT-LLM release."""

    def __init__(self, model: DirectModel, http: httpx.AsyncClient) -> None:
        self._model = model
        self._http = http
        self._number = 0
        self.asked = 0
        """Number of requests sent to the gateway."""

    async def measure(self, how: str, phase: str) -> float:
        """Abort a request in the way `how`, during the phase `phase`.

        Return the milliseconds from the abort until the engine starts the next request.
        """
        tokens = _SHORT if phase == "at the last token" else _ENDLESS
        stop, after_s = None, PHASES[phase]
        if how == "stop string":
            stop, after_s = _STOPS[phase]
        blocker = await self._start_request(_ENDLESS) if phase == "queued" else None
        if blocker is not None:
            await asyncio.sleep(_FIRST_S)
        sent = time.monotonic()
        victim = await self._victim(how, tokens, stop, after_s)
        await asyncio.sleep(sent + _FOLLOWS_S - time.monotonic())
        behind = asyncio.create_task(self._wait_until_scheduled())
        at = sent + after_s
        await asyncio.sleep(at - time.monotonic())
        async with asyncio.timeout(_PATIENCE_S):
            if how in ("client leaves", "stop request"):
                at = time.monotonic()
            if blocker is not None:
                await self._stop(blocker)
            if isinstance(victim, str):
                await self._stop(victim)
            elif how == "client leaves":
                victim.cancel()
            scheduled = await behind
            if not isinstance(victim, str):
                await asyncio.gather(victim, return_exceptions=True)
        return 1e3 * (scheduled - at)

    async def _victim(
        self, how: str, tokens: int, stop: str | None, after_s: float
    ) -> str | asyncio.Task[bytes]:
        """Start the request that will be aborted.

        Return its id if it was sent to Triton, or its client's task if it was sent to the gateway.
        """
        if how == "stop request":
            return await self._start_request(tokens)
        body = {"model": "demo", "prompt": "x", "max_tokens": tokens, "stream": True, "stop": stop}
        headers = {"x-request-timeout": f"{after_s:.3f}"} if how == "deadline" else {}

        async def sent(event: str, _: object) -> None:
            # Count only requests that were sent completely, as the gateway does. On a busy machine,
            # a client may be cancelled before it has sent its request.
            self.asked += event == "http11.send_request_body.complete"

        async def ask() -> bytes:
            path, seen = "/v1/completions", {"trace": sent}
            answer = await self._http.post(path, json=body, headers=headers, extensions=seen)
            return answer.content

        return asyncio.create_task(ask())

    async def _start_request(self, tokens: int) -> str:
        """Send a request straight to Triton without reading its answer. Return the request's id."""
        self._number += 1
        name = f"abort-{self._number}"
        build = self._model.request(name)
        build.texts("prompt", ["x"])
        build.scalar("max_tokens", tokens)
        build.scalar("streaming", True)
        await self._model.send(build.request)
        return name

    async def _stop(self, name: str) -> None:
        await self._model.send(self._model.stop(name))

    async def _wait_until_scheduled(self) -> float:
        """Send a request to Triton, and wait until it leaves the engine's queue.

        Return the monotonic time in seconds at which the engine started the request.
        """
        self._number += 1
        build = self._model.request(f"behind-{self._number}")
        build.texts("prompt", ["x"])
        build.scalar("max_tokens", 1)
        build.scalar("cache_stats", True)
        async for reply in replies(await self._model.send(build.request)):
            if (found := reply.array("first_scheduled_time_ns")) is not None:
                return int(found[0]) / 1e9
        raise RuntimeError("the engine does not tell when it began")

    async def ends(self) -> float:
        """Return the number of ended requests in the gateway's metrics.

        Waits until the gateway has counted all requests, for at most `_PATIENCE_S` seconds.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            ends = await self._ends()
            if ends >= self.asked or time.monotonic() > deadline:
                return ends
            await asyncio.sleep(0.05)

    async def _ends(self) -> float:
        page = (await self._http.get("/metrics")).text
        if _sum(page, "gateway_generations_in_flight"):
            return 0
        return _sum(page, "gateway_requests_total{", "/v1/completions")


def _sum(page: str, family: str, label: str = "") -> float:
    lines = [line for line in page.splitlines() if line.startswith(family) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextlib.asynccontextmanager
async def _run_deployment(triton: str, release: str, port: int) -> AsyncIterator[Deployment]:
    client = TritonClient(triton)
    url = f"http://{LOCALHOST}:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, trust_env=False) as http:
            yield Deployment(await DirectModel.find(client, _name(release)), http)
    finally:
        await client.close()


async def _rows(triton: str, release: str, port: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    async with _run_deployment(triton, release, port) as place:
        # Warm up and discard the result, because the first request takes longer.
        await place.measure("client leaves", "in the middle")
        for how in HOW:
            for phase in PHASES:
                # Skip stop strings in the queue, where no text is generated, and with release 1.2,
                # which sends no text before the end of the answer.
                if how == "stop string" and (phase == "queued" or release == V1_2):
                    continue
                found = [await place.measure(how, phase) for _ in range(rounds)]
                row = {"release": release, "ended by": how, "when": phase}
                rows.append(row | {"median ms": statistics.median(found), "max ms": max(found)})
                print(report.table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        if (ends := await place.ends()) != place.asked:
            raise SystemExit(f"{release}: {place.asked} requests had {ends:g} ends")
    return rows


def _name(release: str) -> str:
    return f"like_{release.replace('.', '_')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    releases = (MAIN, V1_3, V1_2)
    parser.add_argument("--release", nargs="+", choices=releases, default=releases)
    options = parser.parse_args()
    adopt_orphans()
    cores = cores_for(1)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="llmapi-abort-") as name,
        PortClaims() as claims,
        contextlib.closing(Clients(cores.client)) as clients,
    ):
        folder = Path(name)
        engine = synthetic.build(
            folder / "engine",
            vocab_size=4096,
            tokens=_SCRIPT,
            first_token_ms=1e3 * _FIRST_S,
            tokens_per_second=1 / _BEAT_S,
            max_batch_size=1,
            max_seq_len=MAX_SEQ_LEN,
        )
        (engine / "tokenizer.json").symlink_to(MODEL / "tokenizer.json")
        for release in options.release:
            parameters = {"model": str(engine), "behaves_as": release}
            render_llmapi(folder / "repository", parameters, model=_name(release))
        bench = Bench(
            folder=folder, claims=claims, cores=cores, clients=clients, seconds=0, quick=False
        )
        with started_triton(folder, claims) as triton:
            for release in options.release:
                limit = str(MAX_SEQ_LEN)
                settings = {"GATEWAY_TRITON_MODEL": _name(release), "GATEWAY_MAX_SEQ_LEN": limit}
                with bench.gateway(triton.grpc, name=_name(release), settings=settings) as server:
                    rows += asyncio.run(_rows(triton.grpc, release, server.port, options.rounds))
    print(report.table(rows))
    return int(any(row["median ms"] > WITHIN_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
