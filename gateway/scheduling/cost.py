"""Estimated cost of a request at each replica, in prompt tokens that an engine has to compute.

Cached prompt tokens lower the cost. Prompts that already wait there, running answers, and an
adapter upload raise it.

See decision 072 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation.engine_request import Generation
from gateway.scheduling.discovery import DEFAULT_WEIGHT
from gateway.scheduling.replica import Replica
from gateway.triton.prefix_cache import PromptPrefixes

# Waiting prompts are computed first. They count half: computing a cached prompt again elsewhere
# takes that replica's time from other requests.
_WAITING_TOKEN_WEIGHT = 0.5
# Each running answer makes an engine step a little longer.
_TOKENS_PER_RUNNING_REQUEST = 8
# Loading an adapter evicts another one from the engine's cache. An upload of 132 MB takes 0.2 to
# 0.5 s (bench/costs.md), in which an engine computes up to 4,000 tokens.
_LOAD_TOKENS = 512
_BYTES_PER_TOKEN = 32 * 1024
# Shorter common prefixes are not worth routing requests to the same replica for.
_MIN_SHARED_TOKENS = 64


def affinity_key(generation: Generation, prefixes: PromptPrefixes | None) -> bytes | None:
    """Return the key of requests that should meet on one replica, None if nothing is shared.

    The key is the adapter, or the beginning of the prompt.
    """
    if prefixes is None:
        return None
    if generation.params.lora is not None:
        return b"lora %d" % generation.params.lora.task_id
    if prefixes.tokens < _MIN_SHARED_TOKENS:
        return None
    return prefixes.tenant.encode() + prefixes.start


def estimate_costs(
    replicas: Sequence[Replica], generation: Generation, prefixes: PromptPrefixes | None
) -> list[float]:
    """Return the cost at each replica. With equal load, a greater weight lowers the cost."""
    lora = generation.params.lora
    costs = []
    for replica in replicas:
        engine = replica.engine
        cost = (
            _WAITING_TOKEN_WEIGHT * replica.waiting_tokens
            + _TOKENS_PER_RUNNING_REQUEST * replica.in_flight
        )
        if replica.weight:
            cost *= DEFAULT_WEIGHT / replica.weight
        if prefixes is not None:
            cost -= engine.prefixes.cached_tokens(prefixes)
        if (
            lora is not None
            and not engine.capabilities.reads_adapters
            and not engine.residency.is_resident_or_loading(lora.task_id)
        ):
            cost += _LOAD_TOKENS + lora.nbytes / _BYTES_PER_TOKEN
        costs.append(cost)
    return costs
