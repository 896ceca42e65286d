"""The choice of a replica: the cheapest one for a request among those that are not overloaded.

Each key (a LoRA adapter or the beginning of a prompt) has its own order of replicas, by rendezvous
hashing. The order is the same in all gateways. Replicas that join or leave do not change the order
of the others. A key's home is the first replica in its order that is not overloaded. The requests
of a key therefore use as few replicas as their load needs. (Rendezvous hashing: Thaler and
Ravishankar 1998; bounded loads: Mirrokni, Thorup and Zadimoghaddam 2016.)

If weights differ, each replica gets keys and load in proportion to its weight (weighted rendezvous:
Schindelhauer and Schomaker 2005). A request without a key then gets a random key. The choice of the
least load per weight would be wrong: with weights 9 and 1, the second of two concurrent requests
would always go to the replica of weight 1.

See decisions 025, 072 and 074 in docs/decisions.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import ceil, log
from typing import Protocol, TypeVar

# Ratio of a replica's load to the average load above which the replica counts as overloaded. With
# 1.25 a hot key spreads to other replicas early. A lower ratio would move keys needlessly, and each
# move costs an adapter upload or the computation of a cached prompt.
_MAX_LOAD_RATIO = 1.25
# A replica with fewer requests in flight is never overloaded: with 1 and 0 requests on two
# replicas, the average says nothing.
_MIN_BOUND_REQUESTS = 4
# Cost by which the home replica may exceed the cheapest one: another gateway may have loaded the
# key's adapter or prompt at the home replica already.
_HOME_BONUS_TOKENS = 128


class HasLoad(Protocol):
    """The attributes of a replica that the balancer reads."""

    @property
    def endpoint(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def weight(self) -> float: ...


R = TypeVar("R", bound=HasLoad)


def choose(replicas: Sequence[R], key: bytes | None, costs: Sequence[float] | None = None) -> R:
    """Return the replica that a request should go to.

    Args:
        replicas: at least one replica; the weights are all 0 or all positive.
        key: identifies the adapter or prompt beginning that the request shares with others; None
            if there is none.
        costs: estimated cost at each replica, in prompt tokens. Without costs, the key decides.
            Without costs and key, the load decides.
    """
    if len(replicas) == 1:
        return replicas[0]
    loads = [replica.in_flight for replica in replicas]
    weights = [replica.weight for replica in replicas]
    bound = _MAX_LOAD_RATIO * (1 + sum(loads)) / len(loads)
    if weighted := min(weights) != max(weights):
        average = sum(weights) / len(weights)
        bounds = [max(ceil(bound * weight / average), _MIN_BOUND_REQUESTS) for weight in weights]
        key = secrets.token_bytes(8) if key is None else key
    else:
        bounds = [max(ceil(bound), _MIN_BOUND_REQUESTS)] * len(loads)
    # `able` is never empty, because the least loaded replica is always below its bound.
    able = [n for n, load in enumerate(loads) if load < bounds[n]]
    if key is None:
        measure = loads if costs is None else costs
        # Break ties at random, so that several gateways do not all prefer the same replica.
        return replicas[min(able, key=lambda n: (measure[n], random.random()))]
    least = 0.0
    if costs is not None:
        least = min([costs[n] for n in able])
        if sum([costs[n] <= least + _HOME_BONUS_TOKENS for n in able]) == 1:
            return replicas[min(able, key=costs.__getitem__)]
    digest = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    drawn: list[float] = [digest * _salt(replicas[n].endpoint) % 2**64 for n in able]
    if weighted:
        drawn = [-weights[n] / log((d + 0.5) / 2**64) for n, d in zip(able, drawn, strict=True)]
    home = able[drawn.index(max(drawn))]
    if costs is None or costs[home] <= least + _HOME_BONUS_TOKENS:
        return replicas[home]
    return replicas[min(able, key=costs.__getitem__)]


@lru_cache(maxsize=4096)
def _salt(endpoint: str) -> int:
    """Return an odd 64-bit number for an endpoint, by which a key's hash is multiplied.

    The product modulo 2**64 ranks replicas as well as a hash of the key and the endpoint together,
    at a tenth of the cost.
    """
    return int.from_bytes(blake2b(endpoint.encode(), digest_size=8).digest(), "big") | 1
