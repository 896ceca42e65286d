"""LoRA adapters in the cache of one engine, and the uploads of further adapters.

TensorRT-LLM has its own adapter cache. The first request with a `lora_task_id` contains the
adapter's weights; later requests contain only the id. The engine may evict an idle adapter at any
time, and the adapter is then uploaded again. Only one request at a time uploads the same adapter.

See decision 027 in docs/decisions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field

from gateway.triton.adapter_budget import AdapterBudget
from gateway.triton.events import UploadCause


@dataclass(slots=True, eq=False)
class _QueuedUpload:
    """A request that waits for a slot to upload an adapter."""

    until_loading: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Timeout that ends the wait for a slot when another request starts to upload this adapter."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class Residency:
    """Estimate of the content of one replica's adapter cache.

    Not thread-safe: use an instance in one event loop only.
    """

    def __init__(self) -> None:
        self._resident: set[int] = set()
        self._causes: dict[int, UploadCause] = {}
        self._loading: dict[int, asyncio.Event] = {}
        self._queued: dict[int, dict[str, _QueuedUpload]] = {}
        """Queued uploads by task id and tenant."""
        self.loads = 0
        """Number of completed uploads."""
        self.evictions: Counter[int] = Counter()
        """Number of times that the engine reported an adapter as missing, by task id."""
        self.budget = AdapterBudget()
        """The limit on adapters in use."""

    @property
    def resident(self) -> Collection[int]:
        """Task ids of the adapters that are probably in the engine's cache."""
        return self._resident

    @property
    def loading(self) -> Collection[int]:
        """Task ids of the adapters that are being uploaded or wait for an upload slot."""
        return self._loading.keys() | self._queued.keys()

    def is_resident_or_loading(self, task_id: int) -> bool:
        """Return True if the adapter is in the cache, is being uploaded, or waits for an upload."""
        return task_id in self._resident or task_id in self._loading or task_id in self._queued

    async def acquire_upload(
        self,
        task_id: int,
        tenant: str = "",
        upload_slot: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> AsyncExitStack | None:
        """Wait until the adapter is in the engine's cache, or until the caller may upload it.

        Return None if the adapter is in the cache. Otherwise, the caller must upload the adapter,
        and the result is a context manager that holds the upload slot. The caller must exit it when
        the weights are sent, and afterwards call either `mark_loaded` or `mark_not_loaded`.

        If several tenants need the same adapter, one request of each tenant waits for an upload
        slot. The first of these requests that gets a slot uploads the adapter. All other requests
        for the adapter wait for this upload. A tenant therefore never waits for another tenant's
        uploads of other adapters.
        """
        while task_id not in self._resident:
            by_tenant = self._queued.get(task_id, {})
            if task_id in self._loading:
                await self._loading[task_id].wait()
            elif tenant in by_tenant:
                await by_tenant[tenant].finished.wait()
            else:
                entered = AsyncExitStack()
                if not await self._enter_before_others(
                    task_id, tenant, entered.enter_async_context(upload_slot())
                ):
                    continue
                if task_id not in self._resident and task_id not in self._loading:
                    self._loading[task_id] = asyncio.Event()
                    for other in self._queued.pop(task_id, {}).values():
                        other.until_loading.reschedule(0)
                    return entered
                await entered.aclose()  # another request got a slot at the same moment
        return None

    async def _enter_before_others(
        self, task_id: int, tenant: str, upload_slot: Awaitable[object]
    ) -> bool:
        """Wait for an upload slot. Return False if another request started the upload meanwhile."""
        queued = _QueuedUpload()
        self._queued.setdefault(task_id, {})[tenant] = queued
        try:
            async with queued.until_loading:
                await upload_slot
        except TimeoutError:
            if not queued.until_loading.expired():
                raise
            return False
        finally:
            queued.finished.set()
            by_tenant = self._queued.get(task_id, {})
            if by_tenant.get(tenant) is queued:
                del by_tenant[tenant]
                if not by_tenant:
                    del self._queued[task_id]
        return True

    def upload_cause(self, task_id: int) -> UploadCause:
        """Return the reason why the adapter is not in the engine's cache and must be uploaded."""
        return self._causes.get(task_id, "first_use")

    def mark_loaded(self, task_id: int) -> None:
        self._resident.add(task_id)
        self.loads += 1
        self._loading.pop(task_id).set()

    def mark_not_loaded(self, task_id: int) -> None:
        """Record that an upload failed or was aborted. The next request then uploads again."""
        self._loading.pop(task_id).set()

    def mark_evicted(self, task_id: int) -> None:
        self._resident.discard(task_id)
        self.evictions[task_id] += 1
        self._causes[task_id] = "evicted"

    def mark_restarted(self) -> None:
        """Record that the engine has restarted, so its adapter cache is empty."""
        self._causes.update(dict.fromkeys(self._resident, "restarted"))
        self._resident.clear()
