"""The disks of replicas that read adapters from there: what is on them, and who keeps them.

`AgentDisks` are kept by agents beside the replicas, heard of through Redis; the `SharedDisk` is a
folder of this gateway's own store, on a volume that all replicas see.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from adapters.adapter import Converted
from adapters.base_model import BaseModel
from adapters.record import Record
from gateway.catalog.placement import Placement
from lora_store.peft_folders import PeftFolders
from lora_store.peft_keeper import Keeper, Wanted, wanted_of
from lora_store.peft_notices import Heard, Held, Named, PeftNotices
from lora_store.tiered import TieredStore

# An agent that is started again is back sooner. What it held lies there meanwhile.
_LAPSE_S = 60.0
_TELL_BASE_S = 10.0
# What counts of a time in which Redis was not heard.
_MOST_UNHEARD_S = 2.0
_WORK_S = 1.0


class AgentDisks:
    """What agents tell, and what this process tells them. Belongs to one event loop."""

    def __init__(
        self,
        notices: PeftNotices,
        placement: Placement,
        base: Callable[[], BaseModel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notices = notices
        self._placement = placement
        self._base = base
        self._id = secrets.token_hex(8)
        self._beat = 0
        self._clock = clock
        self._told_base = -math.inf
        # Seconds in which Redis answered: while it is away, agents are silent through no fault.
        self._now = 0.0
        self._looked = clock()
        self._beats: Heard[str] = Heard(lambda: self._now)
        self._held: dict[str, Held] = {}

    async def look(self) -> None:
        """Raises StoreError, and what `base` raises; what was known stays known then."""
        beats = await asyncio.to_thread(self._notices.beats)
        now = self._clock()
        self._now += min(now - self._looked, _MOST_UNHEARD_S)
        self._looked = now
        self._beats.take(beats)
        for agent in self._beats.drop(_LAPSE_S):
            self._held.pop(agent, None)
        for agent, told in self._beats.recent().items():
            known = self._held.get(agent)
            if known is None or not told.startswith(f"{known.boot} {known.revision} "):
                held = await asyncio.to_thread(self._notices.held, agent)
                if held is not None:
                    self._held[agent] = held
        self._set()
        # Put together at once: no request can name what is not held by what was just set.
        self._beat += 1
        named = Named(
            beat=self._beat,
            seen={agent: (held.boot, held.revision) for agent, held in self._held.items()},
            in_use=self._placement.in_use(),
        )
        await asyncio.to_thread(self._notices.tell_named, self._id, named)
        if now - self._told_base >= _TELL_BASE_S:
            await asyncio.to_thread(lambda: self._notices.tell_base(self._base()))
            self._told_base = now

    def _set(self) -> None:
        folders: dict[str, dict[str, str]] = {}
        lacks: dict[str, dict[str, str]] = {}
        for held in self._held.values():
            for replica in held.replicas:
                where = folders.setdefault(replica, {})
                where |= {digest: f"{held.path}/{digest}" for digest in held.holds}
                lacks.setdefault(replica, {}).update({**held.lacks, **held.refused})
        # What one engine was not loaded for another one may run.
        agents = [held.refused for held in self._held.values()]
        everywhere = set(agents[0]).intersection(*agents[1:]) if agents else ()
        refused = {digest: agents[0][digest] for digest in everywhere}
        self._placement.set(folders, {}, refused, lacks)

    def close(self) -> None:
        self._notices.close()


class SharedDisk:
    """The folder `root`, which replicas see as `seen_as`; one of the processes that have it keeps
    it. Belongs to one event loop."""

    def __init__(
        self,
        root: Path,
        seen_as: Path,
        placement: Placement,
        *,
        store: TieredStore,
        records: Callable[[], Iterable[Record]],
        base: Callable[[], BaseModel],
        grace_s: float,
    ) -> None:
        """`grace_s` is how long a version outlives its last name: longer than any request."""
        self._folders = PeftFolders(root)
        self._seen_as = seen_as
        self._placement = placement
        self._store = store
        self._records = records
        self._base = base
        self._grace_s = grace_s
        self._keeper: Keeper | None = None

    async def look(self) -> None:
        """Raises OSError, and what `base` raises."""
        loop = asyncio.get_running_loop()

        def fetch(digest: str) -> Converted:
            return asyncio.run_coroutine_threadsafe(self._store.get(digest), loop).result()

        held = await asyncio.to_thread(self._work, wanted_of(self._records()), fetch)
        refused = {} if self._keeper is None else self._keeper.refused
        everywhere = {digest: f"{self._seen_as}/{digest}" for digest in held}
        self._placement.set({}, everywhere, dict(refused), {})

    def _work(self, wanted: list[Wanted], fetch: Callable[[str], Converted]) -> Iterable[str]:
        """For a while; what is held then."""
        if not self._folders.take():
            return self._folders.held()
        if self._keeper is None:
            self._keeper = Keeper(self._folders, max_bytes=None, grace_s=self._grace_s)
        base, ends = self._base(), time.monotonic() + _WORK_S
        while self._keeper.act(wanted, fetch, base, self._unused) and time.monotonic() < ends:
            pass
        return self._keeper.held

    def _unused(self, digest: str, _revision: int) -> bool:
        """Other processes have let go of it: its grace is longer than their requests."""
        return digest not in self._placement.in_use()

    def close(self) -> None:
        self._folders.close()
