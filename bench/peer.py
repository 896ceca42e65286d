"""Gateways that `bench.peers` compares, and the functions that measure one of them."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from bench import direct
from bench.load import LETTER, NUMBER
from bench.measure import chat, encode, percentile, prompt, window
from bench.pace import BURST
from bench.servers import Bench, Server, Unmeasured
from ops.local_stack.ports import LOCALHOST

Figures = dict[str, float]
"""Measured values by the label of their row in the table. The label includes the unit."""

_BEAT_MS, _TRICKLE_STREAMS = 20, 100
_BURST_STREAMS, _ANSWER_TOKENS = 64, 256
_AT_A_TIME = 16
_CHECKED_TOKENS = 37
_STRAIGHT = 200
_WITHIN_S = 30.0


@dataclass(frozen=True)
class Straight:
    """Access to a gateway's upstream without the gateway.

    `path` is the gRPC method that generates tokens. `request` builds a serialized request of this
    method from a request id and the token ids of a prompt.
    """

    address: str
    path: str
    request: Callable[[str, list[int]], bytes]

    def first_tokens(self, ids: list[int]) -> list[float]:
        """Send requests with the prompt `ids`, one at a time.

        Return the seconds from each request to its first token. The first 20 requests are a warm-up
        and are left out.
        """
        asks = [self.request(str(n), ids) for n in range(_STRAIGHT)]
        return asyncio.run(direct.first_tokens(self.address, asks, self.path))[20:]


@dataclass(frozen=True)
class Peer:
    """A gateway in the comparison.

    `straight` is None if the gateway uses a private protocol to its upstream. `floor` is True for
    the relay (`bench.relay`), which only copies bytes: no gateway can have lower figures.
    """

    server: Server
    straight: Straight | None
    floor: bool = False


def check(peer: Peer) -> int | None:
    """Check that the peer returns as many tokens as requested.

    Return the number of prompt tokens that the peer reports, or None for the relay. Raises
    Unmeasured if the number of tokens is wrong.
    """
    body = orjson.loads(chat(seed=BURST, tokens=_CHECKED_TOKENS, prompt_tokens=64))
    body["stream"] = peer.floor
    line = http.client.HTTPConnection(LOCALHOST, peer.server.port, timeout=_WITHIN_S)
    asked = peer.server.body(orjson.dumps(body))
    line.request("POST", peer.server.path, asked, {"content-type": "application/json"})
    answer = line.getresponse()
    said = answer.read()
    line.close()
    if answer.status != 200 or said.count(LETTER) != _CHECKED_TOKENS:
        raise Unmeasured(f"{peer.server.name}: {answer.status} {said[-300:]!r}")
    return None if peer.floor else int(orjson.loads(said)["usage"]["prompt_tokens"])


def request(size: int) -> Callable[[Bench, Peer], Figures]:
    """Return a function that measures the CPU time per request with a prompt of `size` tokens.

    The requests generate one token. 16 requests run at the same time.
    """

    def measured(bench: Bench, peer: Peer) -> Figures:
        body = chat(seed=BURST, tokens=1, prompt_tokens=size)
        seen = window(bench, peer.server, body, _AT_A_TIME, seconds=bench.seconds / 2)
        return {f"CPU us/request, prompt of {size} tokens": seen.us_per_request}

    return measured


def trickle(bench: Bench, peer: Peer) -> Figures:
    """Measure the CPU time per token if each stream receives a token every 20 ms."""
    seen = window(bench, peer.server, chat(seed=_BEAT_MS), _TRICKLE_STREAMS)
    return {f"CPU us/token, {_TRICKLE_STREAMS} streams of 50 tokens/s": seen.us_per_token}


def burst(bench: Bench, peer: Peer) -> Figures:
    """Measure throughput and CPU time per token if the upstream sends as fast as the peer reads.

    The CPU time includes the processing of the requests.
    """
    body = chat(seed=BURST, tokens=_ANSWER_TOKENS)
    seen = window(bench, peer.server, body, _BURST_STREAMS, seconds=bench.seconds / 2)
    name = f"{_BURST_STREAMS} whole answers of {_ANSWER_TOKENS} at once"
    return {
        f"CPU us/token, {name}": seen.us_per_token,
        f"tokens/s, {name}": seen.seen.tokens / seen.seconds,
        f"core %, {name}": seen.core_percent,
    }


def first_token(size: int) -> Callable[[Bench, Peer], Figures]:
    """Return a function that measures the milliseconds that a peer adds to the first token.

    The function sends one request at a time, with a prompt of `size` tokens.
    """

    def measured(bench: Bench, peer: Peer) -> Figures:
        if peer.straight is None:
            return {}
        body = chat(seed=BURST, tokens=1, prompt_tokens=size)
        seen = window(bench, peer.server, body, 1, seconds=bench.seconds / 2, settle_s=0.3)
        ids = encode(prompt(size).replace(NUMBER.decode(), "12345678"))
        straight = peer.straight.first_tokens(ids)
        added = percentile(seen.seen.first, 50) - percentile(straight, 50)
        return {f"added first token p50 ms, prompt of {size} tokens": 1e3 * added}

    return measured
