"""Benchmark of the gateway's CPU time per token with the llmapi repository's model.

In each response message, this model repeats the complete text so far. The model of the repository
inflight_batcher_llm sends only the new token's id. The benchmark measures a gateway for each of the
two repositories, in alternating windows with the same load: 100 streams with one token every 20 ms.
Answers have 64, 512 or 4,096 tokens of 4 bytes. In a window, all positions in an answer are equally
frequent, so messages of all lengths are measured.
"""

from __future__ import annotations

from typing import Any

from bench.measure import Window, chat, window
from bench.servers import MAX_SEQ_LEN, Bench, Server

LENGTHS = (64, 512, 4096)
STREAMS = 100
_BEAT_MS = 20
_ROUNDS = 3
# Seconds over which the starts of the streams are spread: the duration of the shortest answer. If
# all streams started together, their answers would also end together. The measured CPU time would
# then depend on how many of these common ends fall into the window.
_RAMP_S = 1.28
# Seconds between the start of the streams and the window. The first answers begin in the middle of
# their text (see `bench.text_answer`). Their first messages repeat all of the earlier text, and are
# too large to be measured.
_SETTLE_S = 3.0
_PIECE_BYTES = 4


def llmapi(bench: Bench) -> list[dict[str, Any]]:
    """Return a row per answer length: CPU time per token of each gateway, and their ratio.

    The CPU time includes the processing of the requests.
    """
    # Set the maximum sequence length and the number of requests in flight, because the llmapi
    # repository does not report them. With the gateway's default, 36 of the 100 streams would be
    # queued.
    limit = {"GATEWAY_MAX_SEQ_LEN": str(MAX_SEQ_LEN), "GATEWAY_REPLICA_IN_FLIGHT": "256"}
    with (
        bench.upstream() as of_ids,
        bench.upstream(llmapi=True) as of_text,
        bench.gateway(of_ids) as ids,
        bench.gateway(of_text, name="gateway-llmapi", settings=limit) as text,
    ):
        return [_row(bench, ids, text, length) for length in LENGTHS]


def _row(bench: Bench, ids: Server, text: Server, length: int) -> dict[str, Any]:
    body = chat(seed=_BEAT_MS, tokens=length)
    seen: dict[str, list[Window]] = {ids.name: [], text.name: []}
    turns = 1 if bench.quick else _ROUNDS
    for _ in range(turns):
        for server in (ids, text):
            seen[server.name].append(
                window(bench, server, body, STREAMS, settle_s=_SETTLE_S, ramp_s=_RAMP_S)
            )
    by_ids, by_text = (_total(windows) for windows in seen.values())
    return {
        "answer tokens": length,
        "mean text bytes": _PIECE_BYTES * length // 2,
        "CPU us/token": by_text["cost"],
        "token ids: CPU us/token": by_ids["cost"],
        "ratio": by_text["cost"] / by_ids["cost"],
        "tokens/s": by_text["rate"],
        "tokens/delivery": by_text["together"],
        "token ids: tokens/delivery": by_ids["together"],
    }


def _total(windows: list[Window]) -> dict[str, float]:
    tokens = max(sum(each.seen.tokens for each in windows), 1)
    deliveries = sum(len(each.seen.gaps) + len(each.seen.first) for each in windows)
    return {
        "cost": 1e6 * sum(each.cpu_s for each in windows) / tokens,
        "rate": tokens / sum(each.seconds for each in windows),
        "together": tokens / max(deliveries, 1),
    }
