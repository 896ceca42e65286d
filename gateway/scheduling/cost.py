"""What a request would cost at each replica, in tokens of a prompt that an engine has to compute.

Below what its cache likely has of the prompt; above it the prompts that wait there already, the
answers under way, and an adapter that it would have to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation import Generation
from gateway.scheduling.discovery import DEFAULT_WEIGHT
from gateway.scheduling.replica import Replica
from gateway.triton.prefix_cache import PromptPrefixes

# What waits there would be computed first. By half: to compute a prompt anew elsewhere takes that
# replica's time from others.
_WAITING = 0.5
# Each answer under way makes a step of the engine a little longer.
_RUNNING = 8
# To bring an adapter in takes a place in the engine's cache from another one, and 132 MB take half
# a second (bench/README.md), in which an engine computes some 4,000 tokens.
_COLD, _BYTES_PER_TOKEN = 512, 32 * 1024
# Fewer tokens hold nothing that is worth meeting for.
_LEAST = 64


def key_of(generation: Generation, prefixes: PromptPrefixes | None) -> bytes | None:
    """What requests have in common that should meet on one replica: the adapter, or the beginning
    of the prompt. None where there is nothing."""
    if prefixes is None:
        return None
    if generation.params.lora is not None:
        return b"lora %d" % generation.params.lora.task_id
    if prefixes.tokens < _LEAST:
        return None
    return prefixes.tenant.encode() + prefixes.start


def costs_of(
    replicas: Sequence[Replica], generation: Generation, prefixes: PromptPrefixes | None
) -> list[float]:
    """Of each replica. Of two with the same load it is less at the one with more weight."""
    lora = generation.params.lora
    costs = []
    for replica in replicas:
        engine = replica.engine
        cost = _WAITING * replica.waiting_tokens + _RUNNING * replica.in_flight
        if replica.weight:
            cost *= DEFAULT_WEIGHT / replica.weight
        if prefixes is not None:
            cost -= engine.prefixes.cached_tokens(prefixes)
        if (
            lora is not None
            and not engine.capabilities.reads_adapters
            and not engine.residency.is_resident_or_loading(lora.task_id)
        ):
            cost += _COLD + lora.nbytes / _BYTES_PER_TOKEN
        costs.append(cost)
    return costs
