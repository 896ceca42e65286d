"""Benchmark of the latency and CPU time of prompts of various lengths and kinds of text.

The gateway and SMG are measured in alternating windows. In a window, one server gets several
prompts of one kind and length, one at a time. Then the other server gets the same prompts. No
prompt is sent to a server twice.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import orjson

from bench import direct, peer
from bench.load import LETTER, request
from bench.measure import encode, percentile
from bench.pace import BURST
from bench.peer import Peer, Straight
from bench.prompt_texts import (
    cut_passages,
    draw_new_passage,
    draw_page_passage,
    draw_random_words,
    pages,
)
from bench.servers import Bench, Server, Unmeasured, on_cores
from bench.smg import smg
from ops.local_stack.ports import LOCALHOST

_TOKENS = (250, 850, 1000, 2000, 8000, 32_000)
# Number of passages that are sent only once, by their length in tokens. The numbers are small,
# because the passages must not overlap, and half of the project's pages is their only source.
_UNSEEN = {1000: 12, 2000: 5, 8000: 4, 32_000: 2}
_RANDOM_CHARS = (300, 3000)
_ROUNDS, _QUICK_ROUNDS = 7, 3
# Approximate total of prompt tokens in a window, and limits of the number of prompts in a window.
_WINDOW_TOKENS, _MIN_PROMPTS, _MAX_PROMPTS = 64_000, 4, 40
_WARM_UP_TOKENS, _WARM_UP_PROMPTS = 2000, 100
_STRAIGHT_TOKENS = 1000
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_TIMEOUT_S = 30.0

Row = dict[str, Any]


@dataclass
class _Case:
    """Measurements of both servers with prompts of one kind and length.

    Lists have one entry for the gateway, then one for SMG. `prompts` is the number of prompts that
    each server received. `cpu_s` is each server's total CPU time.
    """

    kind: str
    size: str
    first_s: list[list[float]] = field(default_factory=lambda: [[], []])
    """Median time to the first token, in seconds: a list for each server, an entry per window."""
    cpu_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    prompts: int = 0

    def measure(self, clients: Sequence[_Client], texts: list[str]) -> None:
        """Send all `texts` to one server, then to the other, and record the results."""
        for n, client in enumerate(clients):
            before = client.server.cpu_s()
            self.first_s[n].append(median([client.first_token_s(text) for text in texts]))
            self.cpu_s[n] += client.server.cpu_s() - before
        self.prompts += len(texts)

    def row(self, names: Sequence[str], straight_s: Sequence[float]) -> Row:
        """Return a row with the median time that each server adds to the first token.

        A ratio divides the time that the gateway adds by the time that SMG adds in the same round.
        The row has the median of the ratios. `straight_s` has the seconds to the first token of
        each server's upstream without a gateway.
        """
        added = [
            [first - straight for first in found]
            for found, straight in zip(self.first_s, straight_s, strict=True)
        ]
        row: Row = {"prompts of": self.kind, "each": self.size}
        for name, found in zip(names, added, strict=True):
            row[f"{name}: added first token ms"] = 1e3 * median(found)
        row["ratio"] = median([mine / other for mine, other in zip(*added, strict=True)])
        for name, cpu_s in zip(names, self.cpu_s, strict=True):
            row[f"{name}: CPU ms"] = 1e3 * cpu_s / self.prompts
        return row


class _Client:
    """Connection to a server, for one prompt at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._socket = socket.create_connection((LOCALHOST, server.port), timeout=_TIMEOUT_S)

    def first_token_s(self, text: str) -> float:
        """Send a request for one token, and read the complete response.

        Return the seconds from the request to the token.
        """
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0,
            "seed": BURST,
            "stream": True,
        }
        data = self.server.body(orjson.dumps(body))
        began, first = time.perf_counter(), 0.0
        self._socket.sendall(request(self.server.port, self.server.path, data))
        answer = b""
        while not answer.endswith(_END_OF_CHUNKS):
            received = self._socket.recv(2**16)
            if not received:
                raise Unmeasured(f"{self.server.name}: {answer[:300]!r}")
            answer += received
            if not first and LETTER in received:
                first = time.perf_counter() - began
        if not first:
            raise Unmeasured(f"{self.server.name}: {answer[:300]!r}")
        return first

    def close(self) -> None:
        self._socket.close()


def prompts(bench: Bench) -> list[Row]:
    """Return a row for each kind and length of prompts.

    A row has the milliseconds that each server adds to the first token, and its CPU time per
    prompt.

    Raises Unmeasured if SMG is unavailable.
    """
    rounds = bench.rounds or (_QUICK_ROUNDS if bench.quick else _ROUNDS)
    draw = random.Random(time.time_ns())
    make_page, make_new = partial(draw_page_passage, draw), partial(draw_new_passage, draw)
    with _both(bench) as (peers, clients):
        names = [client.server.name for client in clients]
        _warm_up(clients, make_page)
        # Measure the unseen passages first. The new passages, which are sent later, have words from
        # all pages, so a server could then have the words of the unseen passages in a cache.
        unseen = _measure_unseen(clients)
        _warm_up(clients, make_new)
        cases: list[tuple[_Case, int, Callable[[], str]]] = [
            (_Case(kind, f"{size:,} tokens"), size, partial(make, size))
            for kind, make in (("the project's pages", make_page), ("new passages", make_new))
            for size in _TOKENS
        ]
        cases += [
            (_Case("random words", f"{size:,} chars"), size, partial(draw_random_words, draw, size))
            for size in _RANDOM_CHARS
        ]
        for n in range(rounds):
            for case, size, make in cases:
                count = max(_MIN_PROMPTS, min(_MAX_PROMPTS, _WINDOW_TOKENS // size))
                case.measure(clients, [make() for _ in range(count)])
            bench.log(f"prompts: round {n + 1} of {rounds}")
        straight_s = [_straight_s(each) for each in peers]
    every = [*(case for case, _, _ in cases), *unseen]
    return [case.row(names, straight_s) for case in every]


@contextlib.contextmanager
def _both(bench: Bench) -> Iterator[tuple[list[Peer], list[_Client]]]:
    """Run the gateway and SMG, each with its own upstream.

    Yield the two servers, and a connected client for each of them.
    """
    with contextlib.ExitStack() as stack:
        triton = stack.enter_context(bench.upstream())
        straight = Straight(triton, direct.PATH, _infer_request)
        peers = [
            Peer(stack.enter_context(bench.gateway(triton)), straight),
            stack.enter_context(smg(bench)),
        ]
        if len({peer.check(each) for each in peers}) > 1:
            raise Unmeasured("SMG counts other tokens in the same prompt")
        stack.enter_context(on_cores(bench.cores.client))
        clients = [_Client(each.server) for each in peers]
        for client in clients:
            stack.callback(client.close)
        yield peers, clients


def _warm_up(clients: Sequence[_Client], make: Callable[[int], str]) -> None:
    for _ in range(_WARM_UP_PROMPTS):
        text = make(_WARM_UP_TOKENS)
        for client in clients:
            client.first_token_s(text)


def _measure_unseen(clients: Sequence[_Client]) -> list[_Case]:
    """Measure passages from the second text of `pages`, which no other prompt contains.

    Each passage is sent only once.
    """
    _, text = pages()
    cases = []
    for tokens, count in _UNSEEN.items():
        texts = cut_passages(text, tokens)[:count]
        text = text[sum(map(len, texts)) :]
        cases.append(_Case("pages not seen before", f"{tokens:,} tokens"))
        for each in texts:
            cases[-1].measure(clients, [each])
    return cases


def _straight_s(each: Peer) -> float:
    """Return the median seconds to the first token if requests go directly to the upstream."""
    assert each.straight is not None
    ids = encode(draw_page_passage(random.Random(0), _STRAIGHT_TOKENS))
    return percentile(each.straight.first_tokens(ids), 50)


def _infer_request(request_id: str, ids: list[int]) -> bytes:
    return direct.infer_request(request_id, ids, 1, BURST)
