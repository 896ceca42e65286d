"""Which LoRA adapters one engine holds, and which request brings in another.

TensorRT-LLM keeps adapters in a cache of its own: the first request of a `lora_task_id` carries
the weights, later ones the id alone; an idle adapter may be evicted at any time. So first loads of
one id are serialised, and an evicted adapter is sent again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field

from gateway.triton.adapter_room import AdapterBudget
from gateway.triton.events import UploadCause


@dataclass(slots=True, eq=False)
class _QueuedUpload:
    """A request that is in line for its turn to bring an adapter."""

    until_loading: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Ends its waiting when another one begins to bring it."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class Residency:
    """The adapter cache of one replica as seen from here. Belongs to one event loop."""

    def __init__(self) -> None:
        self._resident: set[int] = set()
        self._causes: dict[int, UploadCause] = {}
        self._loading: dict[int, asyncio.Event] = {}
        self._queued: dict[int, dict[str, _QueuedUpload]] = {}
        """By task id and tenant."""
        self.loads = 0
        """How often an adapter was brought in."""
        self.evictions: Counter[int] = Counter()
        """How often the engine said of an adapter that it holds it no more."""
        self.budget = AdapterBudget()
        """Who may use one now."""

    @property
    def resident(self) -> Collection[int]:
        """Task ids that the engine holds, as far as is known."""
        return self._resident

    @property
    def loading(self) -> Collection[int]:
        """Task ids that are being brought, or in line for it."""
        return self._loading.keys() | self._queued.keys()

    def is_resident_or_loading(self, task_id: int) -> bool:
        """Whether a request for it need not bring the weights, as far as is known; or another one
        brings them now, or is in line for it."""
        return task_id in self._resident or task_id in self._loading or task_id in self._queued

    async def acquire_upload(
        self,
        task_id: int,
        tenant: str = "",
        upload_slot: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> AsyncExitStack | None:
        """The turn of a request that has to bring the weights, to be left when they are sent; None
        where it need not bring them.

        Waits while another one brings them. Whichever has its turn first does, and of each tenant
        one is in line for it: nobody waits for a tenant that brings much else. After a turn exactly
        one of `loaded` and `not_loaded` must follow.
        """
        while task_id not in self._resident:
            in_line = self._queued.get(task_id, {})
            if task_id in self._loading:
                await self._loading[task_id].wait()
            elif tenant in in_line:
                await in_line[tenant].finished.wait()
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
                await entered.aclose()  # another one had its turn in the same moment
        return None

    async def _enter_before_others(
        self, task_id: int, tenant: str, upload_slot: Awaitable[object]
    ) -> bool:
        """Whether the turn came before another request began to bring the weights."""
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
            in_line = self._queued.get(task_id, {})
            if in_line.get(tenant) is queued:
                del in_line[tenant]
                if not in_line:
                    del self._queued[task_id]
        return True

    def upload_cause(self, task_id: int) -> UploadCause:
        """Why the weights of an adapter that is not resident have to be sent."""
        return self._causes.get(task_id, "first_use")

    def mark_loaded(self, task_id: int) -> None:
        self._resident.add(task_id)
        self.loads += 1
        self._loading.pop(task_id).set()

    def mark_not_loaded(self, task_id: int) -> None:
        """The request that brought the weights failed or was given up; the next one brings them."""
        self._loading.pop(task_id).set()

    def mark_evicted(self, task_id: int) -> None:
        self._resident.discard(task_id)
        self.evictions[task_id] += 1
        self._causes[task_id] = "evicted"

    def mark_restarted(self) -> None:
        """The engine process is a new one and holds nothing."""
        self._causes.update(dict.fromkeys(self._resident, "restarted"))
        self._resident.clear()
