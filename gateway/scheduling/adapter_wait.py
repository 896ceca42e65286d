"""Requests for adapters that no replica has on its disk yet: they wait apart, and have no place."""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway.errors import AdapterNotReady, EngineError, EngineUnavailable
from gateway.generation import Batch, Lora
from gateway.scheduling.replicas import Replicas

# Of one tenant. Each keeps a connection, of which all tenants together have a limit.
_WAITING = 32
_RETRY_S = 2.0


class AdapterWait:
    """Belongs to one event loop."""

    def __init__(self, replicas: Replicas, wait_s: float) -> None:
        self._replicas = replicas
        self._wait_s = wait_s
        self._waiting: Counter[str] = Counter()

    async def until_there(self, batch: Batch) -> None:
        """Returns when some replica can take each generation, or none is ready at all.

        Raises AdapterNotReady after its time, or at once where many of this tenant wait already,
        EngineError where its disks will never have it, EngineUnavailable where that is so and who
        can be sent it is away, and TimeoutError at the batch's deadline.
        """
        lora, tenant, deadline = (
            batch.generations[0].params.lora,
            batch.caller.tenant,
            batch.deadline,
        )
        if lora is None or lora.folders is None or self._can_take(batch):
            return
        if self._waiting[tenant] >= _WAITING:
            raise not_ready(lora)
        now = asyncio.get_running_loop().time()
        self._waiting[tenant] += 1
        try:
            async with asyncio.timeout_at(min(deadline, now + self._wait_s)):
                while not self._can_take(batch):
                    await lora.folders.wait_for_poll()
        except TimeoutError:
            if now + self._wait_s > deadline:
                raise
            raise not_ready(lora) from None
        except EngineError:
            if self._can_be_sent(batch):
                raise EngineUnavailable(
                    f"No inference server that can run the model `{lora.name}` is available; "
                    "try again shortly."
                ) from None
            raise
        finally:
            self._waiting[tenant] -= 1
            self._waiting += Counter()  # without those of nobody

    def _can_take(self, batch: Batch) -> bool:
        # The choices of a prompt are alike.
        each = len(batch.generations) // batch.prompts
        return all(
            self._replicas.can_take(first, batch.arrived_at) for first in batch.generations[::each]
        )

    def _can_be_sent(self, batch: Batch) -> bool:
        """Whether the pool has a kind, away perhaps, that takes adapters with requests."""
        first = batch.generations[0]
        lora = first.params.lora
        return any(
            kind.capabilities.lora_dtype is not None
            and not kind.capabilities.reads_adapters
            and (not first.forms or kind in first.forms)
            and (lora is None or kind.capabilities.takes_weights(lora.dtype, lora.tp_size))
            for kind in self._replicas.kinds
        )


def not_ready(lora: Lora) -> AdapterNotReady:
    return AdapterNotReady(
        f"The model `{lora.name}` is on its way to the inference server; try again shortly.",
        _RETRY_S,
    )
