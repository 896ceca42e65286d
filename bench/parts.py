"""Parts of the benchmark that measure the gateway itself.

Each public function runs one part, and returns the rows of its table as dicts with equal keys.
Column names include the unit. `CPU` is the CPU time of the process under test, as reported by the
operating system.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from bench import beside, direct, litellm, lora, overload, peers
from bench.cancel import cancel
from bench.instructions import instructions
from bench.limits import limits
from bench.llmapi import llmapi
from bench.load import NUMBER, Clients, Load, total
from bench.long_prompts import long_prompts
from bench.machine import cores_for
from bench.measure import Window, chat, encode, percentile, prompt, receive, window
from bench.pace import BURST
from bench.prompts import prompts
from bench.protocols import protocols
from bench.resident import resident
from bench.servers import TRITON_TOKENS_PER_SECOND, Bench, Server
from gateway.config.settings import Settings

Row = dict[str, Any]
Part = Callable[[Bench], list[Row]]

BEAT_MS = 20
TRICKLE_STREAMS = 100
BURST_STREAMS = 64
LEVELS = (1, 16, 64, 256, 1024)
ANSWER_TOKENS = 256


def _token_row(who: str, pace: str, streams: int, seen: Window) -> Row:
    """Return a row of a table of token costs.

    A gap is the time between two reads with tokens on one stream, measured in the client.
    """
    gaps = seen.seen.gaps
    return {
        "who": who,
        "pace": pace,
        "streams": streams,
        "CPU us/token": seen.us_per_token,
        "core %": seen.core_percent,
        "tokens/s": seen.seen.tokens / seen.seconds,
        "gap p50 ms": 1e3 * percentile(gaps, 50),
        "gap p99 ms": 1e3 * percentile(gaps, 99),
        "longest stall ms": seen.stall_ms,
    }


def tokens(bench: Bench) -> list[Row]:
    """Measure the CPU time and the gaps of tokens at two paces.

    The upstream sends one token per stream every 20 ms, then tokens as fast as the client reads.
    """
    rows = []
    paces = (("trickle", BEAT_MS, TRICKLE_STREAMS), ("burst", BURST, BURST_STREAMS))
    with bench.upstream() as triton:
        for server in bench.subjects(triton):
            for name, seed, streams in paces:
                seen = window(bench, server, chat(seed=seed), streams)
                rows.append(_token_row(server.name, name, streams, seen))
        for kind, who in (
            ("tritonclient", "tritonclient.grpc.aio, receiving only"),
            ("direct", "frames off the socket, receiving only"),
        ):
            for name, seed, streams in paces:
                seen = receive(bench, kind, triton, streams, seed)
                rows.append(_token_row(who, name, streams, seen))
    return rows


def triton(bench: Bench) -> list[Row]:
    """Measure the CPU time and the gaps of tokens from a real Triton with a synthetic engine."""
    rows = []
    streams = TRICKLE_STREAMS
    name = f"Triton, {TRITON_TOKENS_PER_SECOND:.0f}/s"
    with bench.triton(instances=max(1, min(4, len(bench.cores.upstream)))) as address:
        for server in bench.subjects(address):
            seen = window(bench, server, chat(seed=0), streams, settle_s=3.0)
            rows.append(_token_row(server.name, name, streams, seen))
        seen = receive(bench, "tritonclient", address, streams, 0)
        rows.append(_token_row("tritonclient.grpc.aio, receiving only", name, streams, seen))
    return rows


def requests(bench: Bench) -> list[Row]:
    """Measure requests that generate one token, with three prompt lengths.

    16 persistent connections send requests at the same time. No prompt is sent twice.
    """
    rows = []
    with bench.upstream() as triton:
        for server in bench.subjects(triton):
            for size in (8, 64, 750):
                body = chat(seed=BURST, tokens=1, prompt_tokens=size)
                seen = window(bench, server, body, 16)
                first = seen.seen.first
                rows.append(
                    {
                        "who": server.name,
                        "prompt tokens": size,
                        "CPU us/request": seen.us_per_request,
                        "requests/s": seen.seen.finished / seen.seconds,
                        "requests/core-s": seen.seen.finished / max(seen.cpu_s, 1e-9),
                        "first token p50 ms": 1e3 * percentile(first, 50),
                        "first token p99 ms": 1e3 * percentile(first, 99),
                    }
                )
    return rows


def first_token(bench: Bench) -> list[Row]:
    """Measure the latency that a gateway adds to the first token.

    Requests through the gateway alternate with requests sent directly to the upstream. One request
    is sent at a time.
    """
    rows = []
    with bench.upstream() as triton:
        for server in bench.subjects(triton):
            rows += [_first_token_row(bench, server, triton, size) for size in (64, 750)]
    return rows


def _first_token_row(bench: Bench, server: Server, triton: str, size: int) -> Row:
    ids = encode(prompt(size).replace(NUMBER.decode(), "12345678"))
    body = chat(seed=BURST, tokens=1, prompt_tokens=size)
    through: list[float] = []
    straight: list[float] = []
    blocks = 2 if bench.quick else 4
    for block in range(blocks):
        seen = window(bench, server, body, 1, seconds=bench.seconds / blocks, settle_s=0.3)
        through += seen.seen.first
        plain = [direct.infer_request(f"{block}-{n}", ids, 1, BURST) for n in range(200)]
        straight += asyncio.run(direct.first_tokens(triton, plain))[20:]
    row: Row = {"who": server.name, "prompt tokens": len(ids)}
    for percent in (50, 99):
        one, two = (1e3 * percentile(values, percent) for values in (through, straight))
        row |= {
            f"p{percent} ms": one,
            f"direct p{percent} ms": two,
            f"added p{percent} ms": one - two,
        }
    return row


def levels(bench: Bench) -> list[Row]:
    """Measure throughput and CPU time in closed loops with an increasing number of streams."""
    rows = []
    with bench.upstream() as triton:
        for server in bench.subjects(triton):
            some = LEVELS if server.name == "gateway" else LEVELS[1::2]
            rows += [_level(bench, server, streams) for streams in some]
    return rows


def _level(bench: Bench, server: Server, streams: int) -> Row:
    answers = chat(seed=BURST, tokens=ANSWER_TOKENS)
    many = window(bench, server, answers, streams, seconds=bench.seconds / 2)
    one = window(bench, server, chat(seed=BURST, tokens=1), streams, seconds=bench.seconds / 2)
    return {
        "who": server.name,
        "streams": streams,
        f"tokens/s ({ANSWER_TOKENS} each)": many.seen.tokens / many.seconds,
        "CPU us/token": many.us_per_token,
        "requests/s (1 token)": one.seen.finished / one.seconds,
        "CPU us/request": one.us_per_request,
        "client core %": 100 * max(many.seen.busy, one.seen.busy),
        "first token p50 ms": 1e3 * percentile(one.seen.first, 50),
        "first token p99 ms": 1e3 * percentile(one.seen.first, 99),
    }


def many(bench: Bench) -> list[Row]:
    """Measure the delay that the gateway adds to tokens of 1,024 concurrent streams.

    Each stream has 10, then 20 tokens per second, which is below the gateway's maximum throughput.
    """
    rows = []
    with bench.upstream() as triton, bench.gateway(triton) as server:
        for beat_ms in (100, 50):
            straight = receive(bench, "direct", triton, 1024, beat_ms)
            seen = window(bench, server, chat(seed=beat_ms), 1024, settle_s=4.0, watched=True)
            late = percentile(seen.seen.gaps, 99) - percentile(straight.seen.gaps, 99)
            row = _token_row(server.name, f"every {beat_ms} ms", 1024, seen)
            rows.append(row | {"streams alive": seen.seen.live, "added gap p99 ms": 1e3 * late})
    return rows


def memory(bench: Bench) -> list[Row]:
    """Measure the gateway's resident memory after its start, after a load, and per idle stream."""
    with bench.upstream() as triton, bench.gateway(triton) as server:
        found = resident(bench, server)
    return [
        {
            "who": server.name,
            "started MiB": found.started / 2**20,
            "after load MiB": found.used / 2**20,
            "idle streams": found.streams,
            "KiB per idle stream": found.per_stream / 1024,
        }
    ]


def stall(bench: Bench) -> list[Row]:
    """Measure the latency of /health/live, which shows how long the event loop is stalled.

    The first window has 100 streams with a token every 20 ms. In the second window, a client also
    sends requests with prompts of 30,000 tokens, one at a time. Each of these requests generates
    one token.
    """
    rows = []
    with bench.upstream() as triton, bench.gateway(triton) as server:
        for what, size in (("trickle alone", 0), ("and prompts of 30,000 tokens", 30_000)):
            shares = []
            if size:
                begin = time.monotonic() + 1.0
                body = chat(seed=BURST, tokens=1, prompt_tokens=size)
                end = begin + bench.seconds + 1.0
                shares = bench.clients.start(
                    Load(
                        port=server.port,
                        path=server.path,
                        body=body,
                        streams=1,
                        ramp_s=0.0,
                        begin=begin,
                        end=end,
                    )
                )
            seen = window(bench, server, chat(seed=BEAT_MS), TRICKLE_STREAMS, watched=True)
            rows.append(
                {
                    "while": what,
                    "p50 ms": 1e3 * percentile(seen.canary_s, 50),
                    "p99 ms": 1e3 * percentile(seen.canary_s, 99),
                    "longest ms": seen.stall_ms,
                    "gap p99 ms": 1e3 * percentile(seen.seen.gaps, 99),
                    "prompts": total(shares).finished if shares else 0,
                }
            )
    return rows


def workers(bench: Bench) -> list[Row]:
    """Measure throughput with 1, 2, 4 and 8 workers on one port, if there are enough cores."""
    cores = psutil.cpu_count() or 1
    if "workers" not in Settings.model_fields:
        bench.notes.append("workers: this gateway has no setting GATEWAY_WORKERS.")
        return []
    rows: list[Row] = []
    for count in (1, 2, 4, 8):
        if len(os.sched_getaffinity(0)) < 2 * count or (count == 1 and cores < 4):
            bench.notes.append(f"workers: {cores} cores are too few for {count}.")
            break
        places = cores_for(count)
        here = replace(bench, cores=places, clients=Clients(places.client))
        with here.upstream() as triton, here.gateway(triton, workers=count) as server:
            answers = chat(seed=BURST, tokens=ANSWER_TOKENS)
            many = window(here, server, answers, 64 * count)
            one = window(here, server, chat(seed=BURST, tokens=1), 64 * count)
        here.clients.close()
        rows.append(
            {
                "workers": count,
                "tokens/s": many.seen.tokens / many.seconds,
                "times one": many.seen.tokens / rows[0]["tokens/s"] / many.seconds if rows else 1.0,
                "requests/s": one.seen.finished / one.seconds,
                "CPU us/token": many.us_per_token,
                "core %": many.core_percent,
                "busiest client core %": 100 * max(many.seen.busy, one.seen.busy),
            }
        )
    return rows


PARTS: dict[str, Part] = {
    "tokens": tokens,
    "triton": triton,
    "llmapi": llmapi,
    "requests": requests,
    "protocols": protocols,
    "instructions": instructions,
    "first_token": first_token,
    "beside": beside.beside,
    "levels": levels,
    "many": many,
    "memory": memory,
    "stall": stall,
    "long": long_prompts,
    "cancel": cancel,
    "workers": workers,
    "limits": limits,
    "lora": lora.lora,
    "litellm": litellm.litellm,
    "peers": peers.peers,
    "prompts": prompts,
    "overload": overload.overload,
}
