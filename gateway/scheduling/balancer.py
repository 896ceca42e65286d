"""Load balancing: choice of the replica that can run a request at the lowest cost.

Overloaded replicas are excluded. A key identifies a LoRA adapter, or the beginning of a prompt.
Rendezvous hashing gives each key its own order of replicas. This order is the same in all gateways.
A replica that joins or leaves does not change the order of the other replicas. A key's home is the
first replica in its order that is not overloaded. The requests of a key therefore use as few
replicas as their load needs. (Rendezvous hashing: Thaler and Ravishankar 1998; bounded loads:
Mirrokni, Thorup and Zadimoghaddam 2016.)

If weights differ, each replica gets keys and load in proportion to its weight (weighted rendezvous:
Schindelhauer and Schomaker 2005). In this case, a request without a key gets a random key. It would
be wrong to choose the replica with the least load per weight: while a replica of weight 9 runs a
request, each next request would go to an idle replica of weight 1.

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

# A replica is overloaded if it has more requests in flight than this multiple of the average of all
# replicas. A higher ratio would overload the home of a key with many requests. A lower ratio would
# give keys a new home needlessly: the new home must load the adapter or compute the prompt again.
_MAX_LOAD_RATIO = 1.25
# A replica with fewer than this number of requests in flight is never overloaded. Without this
# minimum, a single request would overload a replica whose neighbours are idle.
_MIN_BOUND_REQUESTS = 4
# The home of a request's key is chosen if the request costs at most this many tokens more there
# than at the cheapest replica. Other gateways choose the same home. The home may therefore have
# cached the adapter or the prompt without the knowledge of this gateway.
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
    """Return the replica that should run a request.

    Args:
        replicas: at least one replica; the weights are all 0 or all positive.
        key: identifies the adapter, or the beginning of the prompt. None for a short prompt without
            an adapter.
        costs: estimated cost of the request at each replica, in prompt tokens. If None, the key's
            home (see the module's docstring) is returned. If `key` is also None and all weights are
            equal, the replica with the fewest requests in flight is returned.
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
    # `able` is never empty, because the replica with the least load for its weight is always below
    # its limit in `bounds`.
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
    """Return an odd 64-bit number that is always the same for an endpoint.

    `choose` multiplies a key's hash by this number, modulo 2**64. The replica with the largest
    product is the key's home. Hashing the key together with each endpoint takes ten times as long.
    """
    return int.from_bytes(blake2b(endpoint.encode(), digest_size=8).digest(), "big") | 1
