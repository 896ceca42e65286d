"""Tracking of the LoRA adapter versions on the disks of replicas that read adapters from disk.

The gateway polls the disks. It sends a request only to replicas that have the request's adapter
version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.errors import AdapterError, StoreError
from adapters.record import Record
from gateway.catalog.disks import AgentDisks, SharedDisk
from gateway.catalog.placement import Placement
from gateway.catalog.shortfall import ShortfallLog, find_shortfalls
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.generation.lora import Folders
from gateway.troubles import Troubles
from lora_store.peft_notices import PeftNotices
from lora_store.redis import RedisSettings
from lora_store.tiered import TieredStore

_POLL_INTERVAL_S = 1.0
_WAITING_POLL_INTERVAL_S = 0.25
_MIN_GRACE_S = 3600.0


class DiskPlacement:
    """Tracker of the adapter versions on the replicas' disks.

    There are two ways to copy versions to these disks. Either the replicas mount a shared volume,
    and the gateway writes to this volume. Or each replica's machine runs an agent, which writes to
    the local disk and reports through Redis.

    Attributes:
        placement: the adapter versions on each replica's disk.
        shortfalls: log of versions that are missing on a disk.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        *,
        store: TieredStore,
        redis: RedisSettings | None,
        records: Callable[[], Iterable[Record]],
        base_model: Callable[[], BaseModel],
    ) -> None:
        """Choose the way to copy adapters to the replicas' disks.

        If `settings.peft_dir` is set, `folder` is a shared volume. Otherwise, if `redis` is set,
        agents copy the adapters. If neither is set, adapters are not copied.
        """
        self.placement = Placement()
        self.shortfalls = ShortfallLog()
        self._disks: AgentDisks | SharedDisk | None = None
        if settings.peft_dir is not None:
            self._disks = SharedDisk(
                folder,
                settings.peft_dir,
                self.placement,
                store=store,
                records=records,
                base=base_model,
                grace_s=max(_MIN_GRACE_S, 2 * settings.request_timeout),
            )
        elif redis is not None:
            self._disks = AgentDisks(PeftNotices(redis), self.placement, base_model)

    @property
    def is_followed(self) -> bool:
        """True if this gateway or agents copy adapters to the disks of replicas."""
        return self._disks is not None

    def folders_of(self, weights: str) -> Folders | None:
        """Return the folders of an adapter version on the replicas' disks.

        `weights` is the digest of the version's weights. Return None if adapters are not copied to
        the replicas' disks.
        """
        return None if self._disks is None else self.placement.of(weights)

    def close(self) -> None:
        """Release the lock of a shared volume, or close the connection to the agents' Redis."""
        if self._disks is not None:
            self._disks.close()

    async def follow(self, disks: Callable[[], Mapping[str, bool]], troubles: Troubles) -> None:
        """Poll the disks and update `placement`. Run until cancelled.

        Nothing is polled while no replica reads adapters from disk.

        Args:
            disks: returns for each replica's endpoint True if the replica reads adapters from disk.
            troubles: gets the errors of polls, for operators.
        """
        while True:
            try:
                if self._disks is not None and any(disks().values()):
                    await self._disks.poll()
                    self.shortfalls.update(find_shortfalls(self.placement, disks()))
                troubles.clear("placement")
            except (StoreError, OSError, AdapterError, GatewayError) as error:
                text = f"what replicas have on their disks is as it was: {error}"
                troubles.hold("placement", logging.WARNING, text)
            except Exception as error:  # continue to poll after any error, such as a bad report
                text = f"reading what replicas have on their disks failed: {error!r}"
                troubles.hold("placement", logging.ERROR, text, exc_info=True)
            self.placement.wake()
            await asyncio.sleep(
                _WAITING_POLL_INTERVAL_S if self.placement.waiting else _POLL_INTERVAL_S
            )
