"""The LoRA adapter version that a request uses, and its folders on the disks of replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from adapters.adapter import Converted, Dtype


class Folders(Protocol):
    """The folders of one adapter version, for engines that read adapters from their own disk."""

    def at(self, endpoint: str) -> str | None:
        """Return the path of the version's folder on the replica at `endpoint`.

        Return None if the replica does not have the folder, as far as the gateway knows.
        """

    def using(self, endpoint: str) -> AbstractContextManager[object]:
        """Return a context manager that prevents removal of the folder from the replica.

        A request that uses the folder must run inside this context.
        """

    async def wait_for_poll(self) -> None:
        """Wait until the gateway has polled the disks of the replicas again.

        Raises EngineError if no replica will ever have the version.
        """


@dataclass(frozen=True, slots=True)
class Lora:
    """The LoRA adapter version that a request uses.

    Attributes:
        name: the adapter's name as a label in metrics.
        task_id: the id by which the engine identifies the version.
        nbytes: the size of the weights in bytes.
        weights: loads the weights. Called only if the engine does not have the weights in its
            cache.
        upload_slot: returns a context manager that limits concurrent uploads. Enter it before
            calling `weights`, and exit it when the weights are sent.
        folders: the version's folders, for engines that read adapters from their own disk.
        dtype: the data type of the weights.
        tp_size: the tensor parallel size that the engine must have, because the weights are split
            for this size; None if the weights fit any engine.
        tenant: the tenant of the request.
    """

    name: str
    task_id: int
    nbytes: int
    weights: Callable[[], Awaitable[Converted]]
    upload_slot: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    folders: Folders | None = None
    dtype: Dtype | None = None
    tp_size: int | None = None
    tenant: str = ""
