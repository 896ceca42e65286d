"""The LoRA adapters that one engine has in its cache, and the uploads of further adapters.

TensorRT-LLM has an adapter cache of its own. The first request with a `lora_task_id` carries the
adapter's weights, later requests carry the id alone. The engine may evict an idle adapter at any
time. So one request at a time uploads an adapter, and an evicted adapter is uploaded again.

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
    """Timeout that ends the wait when another request begins the upload."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class Residency:
    """The adapter cache of one replica, as far as this process knows.

    Use each instance in one event loop only.
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
        """Return the task ids of the adapters that the engine holds, as far as known."""
        return self._resident

    @property
    def loading(self) -> Collection[int]:
        """Return the task ids of the adapters that are being uploaded or queued for upload."""
        return self._loading.keys() | self._queued.keys()

    def is_resident_or_loading(self, task_id: int) -> bool:
        """Return True if the adapter is loaded, is being uploaded, or is queued for upload."""
        return task_id in self._resident or task_id in self._loading or task_id in self._queued

    async def acquire_upload(
        self,
        task_id: int,
        tenant: str = "",
        upload_slot: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> AsyncExitStack | None:
        """Wait until the engine holds the adapter, or until the caller has to upload it.

        Return None if the engine holds it. Otherwise return the entered upload slot. The caller
        must then leave the slot when the weights are sent, and after that call exactly one of
        `mark_loaded` and `mark_not_loaded`.

        One request per tenant is queued for a slot, so no tenant waits for another tenant's uploads
        of other adapters. The first of these requests to get its slot uploads the adapter, and the
        others wait for that upload.
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
                await entered.aclose()  # another request got its slot in the same moment
        return None

    async def _enter_before_others(
        self, task_id: int, tenant: str, upload_slot: Awaitable[object]
    ) -> bool:
        """Return True if the slot was entered before another request began the upload."""
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
        """Return the reason why the weights of a non-resident adapter have to be uploaded."""
        return self._causes.get(task_id, "first_use")

    def mark_loaded(self, task_id: int) -> None:
        self._resident.add(task_id)
        self.loads += 1
        self._loading.pop(task_id).set()

    def mark_not_loaded(self, task_id: int) -> None:
        """Record that an upload failed or was aborted; the next request uploads again."""
        self._loading.pop(task_id).set()

    def mark_evicted(self, task_id: int) -> None:
        self._resident.discard(task_id)
        self.evictions[task_id] += 1
        self._causes[task_id] = "evicted"

    def mark_restarted(self) -> None:
        """Record that the engine has restarted, so that it holds no adapters."""
        self._causes.update(dict.fromkeys(self._resident, "restarted"))
        self._resident.clear()
