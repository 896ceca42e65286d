"""Waiting point for requests whose LoRA adapter is still being copied to the replicas.

Requests wait here before they enter the queue for engine slots, so they hold no slot.

See decision 030 in docs/decisions.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway.errors import AdapterNotReady, EngineError, EngineUnavailable
from gateway.generation.batch import Batch
from gateway.generation.lora import Lora
from gateway.scheduling.replicas import Replicas

# Maximum number of waiting requests of one tenant. Each waiting request keeps its client connection
# open. Without this limit, one tenant could use up all connections of the gateway.
_MAX_WAITING_PER_TENANT = 32
_RETRY_AFTER_S = 2.0


class AdapterWait:
    """Waiting point for requests whose LoRA adapter is on no replica's disk yet.

    Not thread-safe: use an instance in one event loop only.
    """

    def __init__(self, replicas: Replicas, wait_s: float) -> None:
        self._replicas = replicas
        self._wait_s = wait_s
        self._waiting: Counter[str] = Counter()

    async def wait_until_available(self, batch: Batch) -> None:
        """Wait until some replica can run each generation of the batch with its LoRA adapter.

        Return at once if no ready replica has a model variant that can run the batch: a copied
        adapter would not help. `Replicas.pick` raises the error when the batch is sent.

        Raises:
            AdapterNotReady: the adapter is on no replica's disk after `wait_s` seconds, or too many
                requests of this tenant wait already.
            EngineError: the adapter will never be on a replica's disk, and no model variant
                accepts the adapter's weights in the request.
            EngineUnavailable: the adapter will never be on a replica's disk. A model variant
                accepts the adapter's weights in the request, but has no available replica.
            TimeoutError: the batch's deadline has passed.
        """
        lora, tenant, deadline = (
            batch.generations[0].params.lora,
            batch.caller.tenant,
            batch.deadline,
        )
        if lora is None or lora.folders is None or self._can_take(batch):
            return
        if self._waiting[tenant] >= _MAX_WAITING_PER_TENANT:
            raise build_not_ready_error(lora)
        now = asyncio.get_running_loop().time()
        self._waiting[tenant] += 1
        try:
            async with asyncio.timeout_at(min(deadline, now + self._wait_s)):
                while not self._can_take(batch):
                    await lora.folders.wait_for_poll()
        except TimeoutError:
            if now + self._wait_s > deadline:
                raise
            raise build_not_ready_error(lora) from None
        except EngineError:
            if self._can_be_sent(batch):
                raise EngineUnavailable(
                    f"No inference server that can run the model `{lora.name}` is available; "
                    "try again shortly."
                ) from None
            raise
        finally:
            self._waiting[tenant] -= 1
            self._waiting += Counter()  # drop tenants with a count of 0

    def _can_take(self, batch: Batch) -> bool:
        # `each` is the number of choices of a prompt. Check only the first choice of each prompt,
        # because all choices need the same adapter.
        each = len(batch.generations) // batch.prompts
        return all(
            self._replicas.can_take(first, batch.arrived_at) for first in batch.generations[::each]
        )

    def _can_be_sent(self, batch: Batch) -> bool:
        """Return True if a model variant accepts the adapter's weights as part of the request.

        A model variant counts even if none of its replicas is available.
        """
        first = batch.generations[0]
        lora = first.params.lora
        return any(
            variant.capabilities.lora_dtype is not None
            and not variant.capabilities.reads_adapters
            and (not first.forms or variant in first.forms)
            and (lora is None or variant.capabilities.takes_weights(lora.dtype, lora.tp_size))
            for variant in self._replicas.variants
        )


def build_not_ready_error(lora: Lora) -> AdapterNotReady:
    """Return the error for an adapter that is not on a replica yet. Clients may retry after 2 s."""
    return AdapterNotReady(
        f"The model `{lora.name}` is on its way to the inference server; try again shortly.",
        _RETRY_AFTER_S,
    )
