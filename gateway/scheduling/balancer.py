"""The choice of a replica: the cheapest one for a request among those that are not overloaded.

Each key (a LoRA adapter or the beginning of a prompt) has its own order of replicas, by rendezvous
hashing. The order is the same in all gateways, and does not change when other replicas join or
leave. A key's home is the first replica in its order that is not overloaded, so a key without
cached data uses as few replicas as its load needs. (Rendezvous hashing: Thaler and Ravishankar
1998; bounded loads: Mirrokni, Thorup and Zadimoghaddam 2016.)

If weights differ, each replica gets keys and load in proportion to its weight (weighted rendezvous:
Schindelhauer and Schomaker 2005). Requests without a key then get a random one: choosing the least
load by weight would send every second of two concurrent requests to a replica of weight 1 beside
one of weight 9.

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

# Load above the average at which a key moves to another replica. With 1.25 a hot key spreads early;
# a needless move costs an adapter upload or computing a prompt again.
_MAX_LOAD_RATIO = 1.25
# Small numbers are not overload: with 1 and 0 requests in flight the average means nothing.
_MIN_BOUND_REQUESTS = 4
# Advantage of the home replica: another gateway may have loaded the key there already.
_HOME_BONUS_TOKENS = 128


class HasLoad(Protocol):
    """A replica as the balancer needs it."""

    @property
    def endpoint(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def weight(self) -> float: ...


R = TypeVar("R", bound=HasLoad)


def choose(replicas: Sequence[R], key: bytes | None, costs: Sequence[float] | None = None) -> R:
    """Return one of `replicas`.

    Args:
        replicas: at least one; the weights are all 0 or all positive.
        key: what requests that should meet on one replica have in common, if anything.
        costs: estimated cost at each replica, in prompt tokens. Without costs the key decides, or
            the load if there is no key.
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
    # The least loaded replica is always below its bound.
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
    """Return an odd 64-bit number for an endpoint.

    The upper half of its product with a key's hash is as good as a hash of both, at a tenth of the
    cost.
    """
    return int.from_bytes(blake2b(endpoint.encode(), digest_size=8).digest(), "big") | 1
