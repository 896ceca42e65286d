"""Disks of replicas that read LoRA adapters from disk.

`AgentDisks` are the local disks of the replicas' machines. An agent on each machine copies adapter
versions to the local disk, and reports the versions through Redis. A `SharedDisk` is a folder on a
volume that all replicas mount. The gateway itself copies adapter versions there.
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
from lora_store.peft_keeper import PeftDiskManager, WantedVersion, list_wanted
from lora_store.peft_notices import AgentState, GatewayState, Heartbeats, PeftNotices
from lora_store.tiered import TieredStore

# Seconds without a report after which an agent is considered stopped. A restart of the agent takes
# less time, and requests can use the files on its disk meanwhile.
_AGENT_TIMEOUT_S = 60.0
_BASE_REPORT_INTERVAL_S = 10.0
# The time between two polls counts as uptime of Redis, up to this number of seconds. If the time is
# longer, Redis was probably unavailable for the rest of it.
_MAX_UNHEARD_S = 2.0
_MAX_WORK_S = 1.0


class AgentDisks:
    """Local disks of the replicas' machines. Agents report their adapter versions through Redis.

    Not thread-safe: use an instance in one event loop only.
    """

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
        self._base_reported_at = -math.inf
        # Total time in seconds during which Redis was available. It is the clock for the timeouts
        # of agents: while Redis is unavailable, agents cannot report, and must not time out.
        self._redis_uptime_s = 0.0
        self._polled_at = clock()
        self._beats: Heartbeats[str] = Heartbeats(lambda: self._redis_uptime_s)
        self._held: dict[str, AgentState] = {}

    async def poll(self) -> None:
        """Read the agents' reports from Redis, and report which versions this gateway uses.

        Raise StoreError if Redis fails. An error of the callback `base` is passed on.
        """
        beats = await asyncio.to_thread(self._notices.read_beats)
        now = self._clock()
        self._redis_uptime_s += min(now - self._polled_at, _MAX_UNHEARD_S)
        self._polled_at = now
        self._beats.update(beats)
        for agent in self._beats.drop(_AGENT_TIMEOUT_S):
            self._held.pop(agent, None)
        for agent, told in self._beats.recent().items():
            known = self._held.get(agent)
            if known is None or not told.startswith(f"{known.boot} {known.revision} "):
                held = await asyncio.to_thread(self._notices.read_agent_state, agent)
                if held is not None:
                    self._held[agent] = held
        self._update_placement()
        # Build the report directly after the update, without an `await` in between. Otherwise, a
        # request could choose a version that the report does not list as used. An agent could then
        # delete that version.
        self._beat += 1
        named = GatewayState(
            beat=self._beat,
            seen={agent: (held.boot, held.revision) for agent, held in self._held.items()},
            in_use=self._placement.in_use(),
        )
        await asyncio.to_thread(self._notices.put_gateway_state, self._id, named)
        if now - self._base_reported_at >= _BASE_REPORT_INTERVAL_S:
            await asyncio.to_thread(lambda: self._notices.put_base(self._base()))
            self._base_reported_at = now

    def _update_placement(self) -> None:
        """Update the `Placement` object from the latest report of each agent."""
        folders: dict[str, dict[str, str]] = {}
        lacks: dict[str, dict[str, str]] = {}
        for held in self._held.values():
            for replica in held.replicas:
                where = folders.setdefault(replica, {})
                where |= {digest: f"{held.path}/{digest}" for digest in held.holds}
                lacks.setdefault(replica, {}).update({**held.lacks, **held.refused})
        # Refuse requests for a version only if all agents have refused to copy the version.
        agents = [held.refused for held in self._held.values()]
        everywhere = set(agents[0]).intersection(*agents[1:]) if agents else ()
        refused = {digest: agents[0][digest] for digest in everywhere}
        self._placement.set(folders, {}, refused, lacks)

    def close(self) -> None:
        self._notices.close()


class SharedDisk:
    """A folder on a volume that all replicas mount.

    If several gateway processes share the folder, only one process writes to the folder. Not
    thread-safe: use an instance in one event loop only.
    """

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
        """Use the folder `root`.

        Args:
            root: the folder's path on this host.
            seen_as: the folder's path on the replicas.
            placement: the object that `poll` updates.
            store: provides the weights of adapter versions.
            records: returns the registry's records of all adapters.
            base: returns the base model.
            grace_s: seconds for which a version stays in the folder after its removal from the
                registry. Must be longer than any request takes.
        """
        self._folders = PeftFolders(root)
        self._seen_as = seen_as
        self._placement = placement
        self._store = store
        self._records = records
        self._base = base
        self._grace_s = grace_s
        self._keeper: PeftDiskManager | None = None

    async def poll(self) -> None:
        """Copy missing versions to the folder, and update the placement.

        Only the process that holds the folder's lock copies versions. Raise OSError if the folder
        cannot be read or written. An error of the callback `base` is passed on.
        """
        loop = asyncio.get_running_loop()

        def fetch(digest: str) -> Converted:
            return asyncio.run_coroutine_threadsafe(self._store.get(digest), loop).result()

        held = await asyncio.to_thread(self._work, list_wanted(self._records()), fetch)
        refused = {} if self._keeper is None else self._keeper.refused
        everywhere = {digest: f"{self._seen_as}/{digest}" for digest in held}
        self._placement.set({}, everywhere, dict(refused), {})

    def _work(
        self, wanted: list[WantedVersion], fetch: Callable[[str], Converted]
    ) -> Iterable[str]:
        """Copy missing versions to the folder. Return the digests of all versions in the folder.

        Stop copying after about `_MAX_WORK_S` seconds. If another process holds the folder's lock,
        copy nothing.
        """
        if not self._folders.take():
            return self._folders.list_versions()
        if self._keeper is None:
            self._keeper = PeftDiskManager(self._folders, max_bytes=None, grace_s=self._grace_s)
        base, ends = self._base(), time.monotonic() + _MAX_WORK_S
        while self._keeper.act(wanted, fetch, base, self._is_unused) and time.monotonic() < ends:
            pass
        return self._keeper.available

    def _is_unused(self, digest: str, _revision: int) -> bool:
        """Return True if no request of this process uses the version.

        Requests of other processes need no check. A version is removed only after the grace time,
        which is longer than the time limit of any request.
        """
        return digest not in self._placement.in_use()

    def close(self) -> None:
        self._folders.close()
