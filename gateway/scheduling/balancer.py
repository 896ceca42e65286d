"""Which replica is next: the one where a request costs least, of those that are not overloaded.

A key (a LoRA adapter, the beginning of a prompt) has an order of replicas of its own, by rendezvous
hashing: it stays the same when others come and go, and is the same in all gateways. It is at home
at the first one of these that is not overloaded, so a key that nothing is known of lives on as few
replicas as its load needs. (Rendezvous hashing: Thaler and Ravishankar 1998; bounded loads:
Mirrokni, Thorup and Zadimoghaddam 2016.)

Where weights differ each replica has keys, and load, in proportion to its own (weighted rendezvous:
Schindelhauer and Schomaker 2005). Without a key one is drawn then: the least of load by weight
would give a replica of weight 1 beside one of 9 every second request of two at a time.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import ceil, log
from typing import Protocol, TypeVar

# How far above the average a replica may be loaded before a key moves on. At 1.25 a hot key spreads
# early; one that is moved without need costs a cold adapter or a prompt computed anew.
_BOUND = 1.25
# Small numbers are no load: with 1 and 0 requests in flight the average says nothing.
_FREE = 4
# In tokens, as costs are. Where nothing is known of a key another gateway may have brought it home.
_AT_HOME = 128


class Loaded(Protocol):
    @property
    def endpoint(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def weight(self) -> float: ...


R = TypeVar("R", bound=Loaded)


def choose(replicas: Sequence[R], key: bytes | None, costs: Sequence[float] | None = None) -> R:
    """One of `replicas`, of which there is at least one; all weights are 0, or none is.

    `costs` are what the request would take of each, in tokens of a prompt. Without them the key
    decides, or the load alone.
    """
    if len(replicas) == 1:
        return replicas[0]
    loads = [replica.in_flight for replica in replicas]
    weights = [replica.weight for replica in replicas]
    bound = _BOUND * (1 + sum(loads)) / len(loads)
    if weighted := min(weights) != max(weights):
        average = sum(weights) / len(weights)
        bounds = [max(ceil(bound * weight / average), _FREE) for weight in weights]
        key = secrets.token_bytes(8) if key is None else key
    else:
        bounds = [max(ceil(bound), _FREE)] * len(loads)
    # The least loaded one is always below its bound.
    able = [n for n, load in enumerate(loads) if load < bounds[n]]
    if key is None:
        measure = loads if costs is None else costs
        # Ties are broken by chance, so that several gateways do not all prefer the same one.
        return replicas[min(able, key=lambda n: (measure[n], random.random()))]
    least = 0.0
    if costs is not None:
        least = min([costs[n] for n in able])
        if sum([costs[n] <= least + _AT_HOME for n in able]) == 1:
            return replicas[min(able, key=costs.__getitem__)]
    digest = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    drawn: list[float] = [digest * _salt(replicas[n].endpoint) % 2**64 for n in able]
    if weighted:
        drawn = [-weights[n] / log((d + 0.5) / 2**64) for n, d in zip(able, drawn, strict=True)]
    home = able[drawn.index(max(drawn))]
    if costs is None or costs[home] <= least + _AT_HOME:
        return replicas[home]
    return replicas[min(able, key=costs.__getitem__)]


@lru_cache(maxsize=4096)
def _salt(endpoint: str) -> int:
    """An odd number of 64 bits. The upper half of its product with a key's is as good as a hash of
    both, at a tenth of the price."""
    return int.from_bytes(blake2b(endpoint.encode(), digest_size=8).digest(), "big") | 1
