"""Estimated cost of a request at each replica, in prompt tokens that an engine has to compute.

Prompt tokens in the replica's cache lower the cost. Prompts that already wait at the replica,
running answers and an adapter upload raise the cost.

See decision 072 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation.engine_request import Generation
from gateway.scheduling.discovery import DEFAULT_WEIGHT
from gateway.scheduling.replica import Replica
from gateway.triton.prefix_cache import PromptPrefixes

# Cost of each uncached prompt token of requests that already wait at the replica: the engine
# computes these tokens first. The cost is below 1, so that a request prefers a replica that has
# cached its prompt, even if the request must wait there.
_WAITING_TOKEN_WEIGHT = 0.5
# Cost of each running request in prompt tokens. Each running request makes every engine step
# longer.
_TOKENS_PER_RUNNING_REQUEST = 8
# Cost of loading an adapter, in prompt tokens. `_LOAD_TOKENS` is a fixed cost, because the engine
# evicts another adapter. Each `_BYTES_PER_TOKEN` bytes of weights cost one more token. For example,
# an upload of 132 MB takes 0.2 to 0.5 s (bench/costs.md), in which an engine computes up to 4,000
# prompt tokens.
_LOAD_TOKENS = 512
_BYTES_PER_TOKEN = 32 * 1024
# Minimum prompt length in tokens for which requests with equal beginnings go to the same replica.
# For shorter prompts, a cache hit saves too little time.
_MIN_SHARED_TOKENS = 64


def affinity_key(generation: Generation, prefixes: PromptPrefixes | None) -> bytes | None:
    """Return a key for `balancer.choose`. Requests with equal keys should run on the same replica.

    The key identifies the LoRA adapter or, without an adapter, the beginning of the prompt. Return
    None for a short prompt without an adapter, and if `prefixes` is None.
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
    """Return the cost of the generation at each replica, in prompt tokens.

    Requests that already run or wait at a replica increase the replica's cost. This increase is
    inversely proportional to the replica's weight.
    """
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
