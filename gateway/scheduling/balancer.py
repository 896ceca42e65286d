"""Which replica is next: the least loaded one, or the one where a key is at home.

A key (a LoRA adapter, the beginning of a prompt) has an order of replicas of its own, by rendezvous
hashing: it stays the same when others come and go. The first replica of that order that is not
overloaded is taken, so a key lives on as few replicas as its load needs. (Rendezvous hashing:
Thaler and Ravishankar 1998; bounded loads: Mirrokni, Thorup and Zadimoghaddam 2016.)

Where weights differ each replica has keys, and load, in proportion to its own (weighted rendezvous:
Schindelhauer and Schomaker 2005). Without a key one is drawn then: the least of load by weight
would give a replica of weight 1 beside one of 9 every second request of two at a time.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import ceil, log
from typing import Protocol, TypeVar

# How far above the average a replica may be loaded before a key moves on. At 1.25 a hot key spreads
# early; one that is moved without need costs a cold adapter or a prompt computed anew.
_BOUND = 1.25
# Small numbers are no load: with 1 and 0 requests in flight the average says nothing.
_FREE = 4


class Loaded(Protocol):
    @property
    def endpoint(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def weight(self) -> float: ...


R = TypeVar("R", bound=Loaded)


def choose(replicas: Sequence[R], key: bytes | None) -> R:
    """One of `replicas`, of which there is at least one; all weights are 0, or none is."""
    if len(replicas) == 1:
        return replicas[0]
    first = replicas[0].weight
    if any(replica.weight != first for replica in replicas):
        return _weighted(replicas, secrets.token_bytes(8) if key is None else key)
    if key is None:
        return least_loaded(replicas)
    bound = max(ceil(_BOUND * (1 + sum(r.in_flight for r in replicas)) / len(replicas)), _FREE)
    at_home = sorted(replicas, key=place_of(key), reverse=True)
    return next((r for r in at_home if r.in_flight < bound), None) or least_loaded(replicas)


def _weighted(replicas: Sequence[R], key: bytes) -> R:
    """As `choose`, where weights differ."""
    place = place_of(key)

    def score(replica: R) -> float:
        drawn = (int.from_bytes(place(replica), "big") + 0.5) / 2**64
        return -replica.weight / log(drawn)

    each = _BOUND * (1 + sum(r.in_flight for r in replicas)) / sum(r.weight for r in replicas)
    for replica in sorted(replicas, key=score, reverse=True):
        if replica.in_flight < max(ceil(each * replica.weight), _FREE):
            return replica
    return min(replicas, key=lambda replica: replica.in_flight / replica.weight)


def least_loaded(replicas: Sequence[R]) -> R:
    """Ties are broken by chance, so that several gateways do not all prefer the same one."""
    return min(replicas, key=lambda replica: (replica.in_flight, random.random()))


def place_of(key: bytes) -> Callable[[Loaded], bytes]:
    """The order of the replicas for `key`: each one's hash with it."""
    return lambda replica: blake2b(key + replica.endpoint.encode(), digest_size=8).digest()
