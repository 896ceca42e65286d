"""The adapter version of a request, and its folders on the disks of replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from adapters.adapter import Converted, Dtype


class Folders(Protocol):
    """The folders of one adapter version, for engines that read adapters from their own disk."""

    def at(self, endpoint: str) -> str | None:
        """Return the version's folder as that replica sees it, or None if the replica is not known
        to have it."""

    def using(self, endpoint: str) -> AbstractContextManager[object]:
        """Return a context manager that keeps the folder on the replica while a request names
        it."""

    async def wait_for_poll(self) -> None:
        """Return after the next poll of the replicas.

        Raises EngineError if no replica will ever have the version.
        """


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter version of a request.

    Attributes:
        name: the label in metrics.
        task_id: the id by which the engine knows the version.
        nbytes: the size of the weights in bytes.
        weights: reads the tensors. Needed only if the engine does not hold the version.
        upload_slot: makes a context manager to hold from before `weights` is read until they are
            sent.
        folders: the version's folders, for engines that read adapters from their own disk.
        dtype: the data type of the weights.
        tp_size: the tp_size of engines that take these weights; None for any.
        tenant: the tenant of the request. Tenants share an engine's adapter budget.
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
