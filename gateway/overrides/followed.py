"""Class for reading and setting overrides (weights and drains of replicas) in the event loop.

A separate thread accesses Redis and the disk, because these calls block.

See decision 010 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gateway.errors import OverridesUnavailable
from gateway.overrides.copies import OverrideCopies
from gateway.scheduling.override import Override, Overrides
from gateway.troubles import Troubles
from lora_store.primary import describe

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5


class LiveOverrides:
    """The current overrides (weights and drains of replicas), by the replica's endpoint.

    Use an instance as an async context manager, and run `follow` within the context. Whenever the
    overrides have changed, `apply` is called with all overrides.
    """

    def __init__(self, copies: OverrideCopies, apply: Callable[[Overrides], None]) -> None:
        self._copies = copies
        self._apply = apply
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="overrides")
        self._failure = ""
        self.current: Overrides = {}

    async def __aenter__(self) -> LiveOverrides:
        await self._poll()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        self._copies.close()

    async def follow(self, troubles: Troubles) -> None:
        """Poll Redis for changes by other processes, about twice a second. Run until cancelled.

        Return at once without Redis, because no other process can change the overrides.
        """
        while self._copies.is_shared:
            await asyncio.sleep(_POLL_INTERVAL_S)
            try:
                await self._poll()
            except Exception as error:  # continue to poll after any error
                text = f"overrides of replicas are not up to date: {error!r}"
                troubles.hold("overrides_look", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("overrides_look")

    @property
    def problem(self) -> str:
        """Reason why `current` may be out of date; empty if it is up to date."""
        return self._failure

    @property
    def disk_problem(self) -> str:
        """Error of the last attempt to read the file; see `OverrideCopies.unreadable`."""
        return self._copies.unreadable

    async def put(self, endpoint: str, override: Override | None) -> None:
        """Set the override of the replica with this endpoint.

        If `override` is None, remove the replica's override.

        The change takes effect in this process at once, and in other processes within a second.
        Raise OverridesUnavailable if the override cannot be stored.
        """
        await self._run(partial(self._copies.put, endpoint, override))

    async def _poll(self) -> None:
        try:
            await self._run(self._copies.refresh)
        except OverridesUnavailable as error:
            why = describe(error.__cause__)
            if not self._failure:
                log.warning("overrides of replicas stay as they are: Redis fails: %s", why)
            self._failure = f"overrides of replicas stay as they are: Redis fails: {why}"
        else:
            if self._failure:
                log.info("overrides of replicas are up to date again")
            self._failure = ""

    async def _run(self, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, work)
        finally:
            if self._copies.current != self.current:
                self.current = self._copies.current
                self._apply(self.current)
