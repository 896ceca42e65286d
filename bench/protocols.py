"""Benchmark of the gateway's CPU time per request and per token in each HTTP protocol.

The protocols are OpenAI's chat completions, completions and responses, and Anthropic's messages.
Their windows alternate in one run. All responses are streamed, and report usage at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import orjson

from bench.measure import TOKENS_FOR_EVER, Window, percentile, prompt, window
from bench.pace import BURST
from bench.servers import Bench, Server

_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
_BEAT_MS, _STREAMS, _BURSTING, _AT_ONCE = 20, 100, 64, 16
_SIZES = 8, 750
_ROUNDS = 3


def _chat(text: str, tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **_USAGE}


def _completion(text: str, tokens: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": tokens, **_USAGE}


def _message(text: str, tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}


def _response(text: str, tokens: int, *, store: bool = False) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": tokens, "store": store}


def _stored_response(text: str, tokens: int) -> dict[str, Any]:
    return _response(text, tokens, store=True)


PROTOCOLS: dict[str, tuple[str, Callable[[str, int], dict[str, Any]]]] = {
    "chat completions": ("/v1/chat/completions", _chat),
    "completions": ("/v1/completions", _completion),
    "messages": ("/v1/messages", _message),
    "responses": ("/v1/responses", _response),
    "responses, stored": ("/v1/responses", _stored_response),
}


def protocols(bench: Bench) -> list[dict[str, Any]]:
    """Return a row per protocol with medians of alternating windows.

    A row has the CPU time per request with two prompt sizes, and per token at two paces. A `seed`
    in the request would select the pace, but some protocols have no such parameter. Each pace
    therefore has its own upstream.
    """
    rows: dict[str, dict[str, Any]] = {name: {"protocol": name} for name in PROTOCOLS}
    with bench.upstream() as triton, bench.gateway(triton) as server:
        for size in _SIZES:
            for name, windows in _measure_alternating(bench, server, size, 1, _AT_ONCE).items():
                first = [1e3 * percentile(each.seen.first, 50) for each in windows]
                rows[name] |= {
                    f"CPU us/request, {size} tokens": _median(w.us_per_request for w in windows),
                    f"first token ms, {size}": _median(first),
                }
    for column, seed, streams in (
        ("CPU us/token, paced", _BEAT_MS, _STREAMS),
        ("in burst", BURST, _BURSTING),
    ):
        with bench.upstream(seed=seed) as triton, bench.gateway(triton) as server:
            found = _measure_alternating(bench, server, _SIZES[0], TOKENS_FOR_EVER, streams)
        for name, windows in found.items():
            rows[name][column] = _median(w.us_per_token for w in windows)
    return list(rows.values())


def _measure_alternating(
    bench: Bench, server: Server, size: int, tokens: int, streams: int
) -> dict[str, list[Window]]:
    seen: dict[str, list[Window]] = {name: [] for name in PROTOCOLS}
    for _ in range(1 if bench.quick else _ROUNDS):
        for name, (path, make) in PROTOCOLS.items():
            body = make(prompt(size), tokens) | {"model": "demo", "stream": True, "temperature": 0}
            here = replace(server, path=path)
            seen[name].append(window(bench, here, orjson.dumps(body), streams))
    return seen


def _median(values: Iterable[float]) -> float:
    return percentile(list(values), 50)
