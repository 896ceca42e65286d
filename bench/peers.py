"""Comparison of the gateway with compiled gateways, and with a relay that only copies bytes.

All gateways run on the same core. They have the same load client, the same tokenizer, and scripted
upstreams of the same pace. They are measured one at a time, and their measurement windows
alternate. A ratio is computed for each pair of successive windows, so that slow changes of the
machine's speed cancel out. The table shows the median of the ratios.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

from bench import direct, peer
from bench.cancel import before_first_token
from bench.dynamo import dynamo
from bench.grpc_server import MARKED
from bench.measure import percentile
from bench.pace import BURST
from bench.peer import Figures, Peer, Straight
from bench.relay import relay
from bench.resident import resident
from bench.servers import Bench, Unmeasured
from bench.smg import smg

_SIZES = (8, 64, 750)
_WINDOWS = (
    *(peer.request(size) for size in _SIZES),
    peer.trickle,
    peer.burst,
    *(peer.first_token(size) for size in _SIZES[1:]),
)
_ROUNDS, _QUICK_ROUNDS = 5, 3


def peers(bench: Bench) -> list[dict[str, Any]]:
    """Return a row per measured quantity: the gateway's value, and each peer's value and ratio.

    Raises Unmeasured if no peer is available.
    """
    with contextlib.ExitStack() as stack:
        triton = stack.enter_context(bench.upstream())
        straight = Straight(triton, direct.PATH, _request)
        ours = Peer(stack.enter_context(bench.gateway(triton)), straight)
        counted = peer.check(ours)
        turns = _Rounds(bench, [ours])
        turns.once(ours, _memory(bench, ours))
        begin: dict[str, Callable[[], AbstractContextManager[Peer]]] = {
            "SMG": lambda: smg(bench),
            "Dynamo": lambda: dynamo(bench),
            "the relay in C": lambda: _floor(bench, straight),
        }
        for name, begun in begin.items():
            try:
                other = stack.enter_context(begun())
                if peer.check(other) not in {counted, None}:
                    raise Unmeasured("it counts other tokens in the same prompt")
                turns.once(other, _memory(bench, other))
            except Unmeasured as error:
                bench.notes.append(f"peers: {name}: not measured: {error}")
            else:
                turns.peers.append(other)
        if len(turns.peers) == 1:
            raise Unmeasured("no peer can be had; the notes say why")
        for n in range(bench.rounds or (_QUICK_ROUNDS if bench.quick else _ROUNDS)):
            turns.round()
            bench.log(f"peers: round {n + 1}")
        # Measure disconnects last: if a peer does not stop the requests of clients that have
        # disconnected, they would still run during the next measurement.
        for n, each in enumerate(each for each in turns.peers if not each.floor):
            turns.once(each, _measure_left(bench, each, n))
    return turns.rows()


class _Rounds:
    """Measured values of all rounds, by row of the table and by peer.

    `peers` are the compared gateways in the order of the columns. This project's gateway is first.
    """

    def __init__(self, bench: Bench, peers: list[Peer]) -> None:
        self.peers = peers
        self._bench = bench
        self._found: dict[str, dict[str, list[float]]] = {}

    def once(self, each: Peer, figures: Figures) -> None:
        for name, value in figures.items():
            by_peer = self._found.setdefault(name, {})
            by_peer.setdefault(each.server.name, []).append(value)

    def round(self) -> None:
        """Run all measurements once.

        Each measurement runs for all peers before the next measurement starts, so that the windows
        that are compared are adjacent in time.
        """
        for measured in _WINDOWS:
            for each in self.peers:
                self.once(each, measured(self._bench, each))

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows, with the median over all rounds of each value.

        A ratio divides the gateway's value by the peer's value of the same round. The table has the
        median of these ratios. Rounds in which the peer's value is 0 are left out.
        """
        ours = self.peers[0].server.name
        rows = []
        for figure, by_peer in self._found.items():
            row: dict[str, Any] = {"what": figure, ours: median(by_peer[ours])}
            for each in self.peers[1:]:
                name = each.server.name
                found = by_peer.get(name, [math.nan] * len(by_peer[ours]))
                row[name] = median(found)
                if not each.floor:
                    pairs = zip(by_peer[ours], found, strict=True)
                    ratios = [mine / theirs for mine, theirs in pairs if theirs]
                    row[f"of {name}"] = median(ratios) if ratios else math.nan
            rows.append(row)
        return rows


@contextlib.contextmanager
def _floor(bench: Bench, straight: Straight) -> Iterator[Peer]:
    with relay(bench, straight.address) as server:
        yield Peer(server, straight, floor=True)


def _request(request_id: str, ids: list[int]) -> bytes:
    return direct.infer_request(request_id, ids, 1, BURST)


def _memory(bench: Bench, each: Peer) -> Figures:
    found = resident(bench, each.server)
    return {"MiB at start": found.started / 2**20, "KiB of an idle stream": found.per_stream / 1024}


def _measure_left(bench: Bench, each: Peer, n: int) -> Figures:
    """Let clients disconnect before the first token, and count the requests that the peer stops."""
    count = 20 if bench.quick else 100
    late = before_first_token(bench, each.server, MARKED + n * count, count)
    return {
        f"stopped of {count} left before the first token": len(late),
        "their stop p99 ms": 1e3 * percentile(late, 99),
    }
