"""The replicas of one model: kept in step with the configuration, chosen from, drained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from gateway.errors import AdapterNotReady, EngineUnavailable
from gateway.generation import Lora
from gateway.observability.request_context import RequestContext
from gateway.scheduling.balancer import choose
from gateway.scheduling.discovery import is_name, resolve
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.triton.engine import Engine
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.selection import ModelSelection

log = logging.getLogger(__name__)

# A pod's address is known a second after it is ready; name servers are asked no more often.
_LOOKUP_PERIOD_S = 2.0


class Replicas:
    """All replicas of this gateway. Belongs to one event loop.

    `make` builds the engine of an endpoint; it raises ValueError for an endpoint that is none.
    """

    def __init__(
        self,
        make: Callable[[str], Engine],
        limit: Callable[[ModelCapabilities], int | None] = lambda _: None,
    ) -> None:
        """`limit` says how many requests a replica may have in flight, None without a limit."""
        self._make = make
        self._limit = limit
        self._replicas: dict[str, Replica] = {}
        self._leaving: set[Replica] = set()
        self.configured: list[str] = []
        """What `configure` was last told."""
        self._lookup: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._seen_ready = asyncio.Event()
        self._draining = False

    def __iter__(self) -> Iterator[Replica]:
        """Those of the configuration, and those that still finish what they have."""
        return iter([*self._replicas.values(), *self._leaving])

    @property
    def ready(self) -> bool:
        return any(replica.ready for replica in self._replicas.values())

    @property
    def several(self) -> bool:
        return len(self._replicas) > 1

    @property
    def draining(self) -> bool:
        """Whether this gateway is ending, so that what is stopped now is stopped for that."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for replica in self:
            replica.engine.draining = value

    @property
    def places(self) -> int | None:
        """How many requests may be in flight on all that are ready; None without a limit."""
        return self._places(failing=False)

    @property
    def capacity(self) -> int | None:
        """As `places`, were none of them failing."""
        return self._places(failing=True)

    def _places(self, *, failing: bool) -> int | None:
        """`failing` says to count those that are left alone for a while."""
        places = 0
        for replica in self._replicas.values():
            if not replica.ready or not (failing or replica.breaker.allows):
                continue
            if replica.breaker.open and not failing:
                places += 1  # for the probe
            else:
                limit = self._limit(replica.engine.capabilities)
                if limit is None:
                    return None
                places += limit
        return places

    def has_other_than(self, tried: Collection[Replica], lora: Lora | None = None) -> bool:
        """Whether `pick` would find one that is none of `tried`."""
        return bool(self._candidates(tried, lora))

    def can_take(self, lora: Lora) -> bool:
        """Whether a request for this adapter need not wait for a replica to get it.

        So it is, too, where no replica is ready.
        """
        ready = [replica for replica in self._replicas.values() if replica.ready]
        return not ready or any(replica.takes(lora) for replica in ready)

    @property
    def read_adapters(self) -> bool:
        """Whether any of them reads adapters from its own disk."""
        return any(
            replica.ready and replica.engine.capabilities.reads_adapters
            for replica in self._replicas.values()
        )

    @property
    def why_not_ready(self) -> str:
        """What was last seen of each replica."""
        if not self._replicas:
            return f"no address is known for {', '.join(self.configured)}"
        return "; ".join(r.engine.why_not_ready for r in self._replicas.values())

    @property
    def selection(self) -> ModelSelection:
        """What the replicas serve. Raises EngineUnavailable while none of them is ready."""
        for replica in self._replicas.values():
            if replica.ready:
                return replica.engine.selection
        raise EngineUnavailable("The inference server is not ready.")

    @property
    def capabilities(self) -> ModelCapabilities:
        """As `selection`."""
        return self.selection.capabilities

    async def wait_ready(self) -> None:
        """Returns once one of them has been seen serving."""
        await self._seen_ready.wait()

    def pick(
        self,
        request: RequestContext,
        key: bytes | None = None,
        avoid: Collection[Replica] = (),
        lora: Lora | None = None,
    ) -> ReplicaLease:
        """A place for `request` on a replica that works, has its adapter and is none of `avoid`.

        Requests of one `key` go to few replicas. Raises EngineUnavailable when there is none, and
        AdapterNotReady when all of them lack the adapter.
        """
        candidates = self._candidates(avoid, lora)
        if not candidates and lora is not None and self._candidates(avoid):
            raise AdapterNotReady(f"The model `{lora.name}` is not there; try again shortly.")
        if not candidates:
            raise EngineUnavailable("No inference server is available; try again shortly.")
        return ReplicaLease(choose(candidates, key), request, self._released)

    def _candidates(self, avoid: Collection[Replica], lora: Lora | None = None) -> list[Replica]:
        """Those that work, or else seem to; among them those with room, or else all."""
        able = [
            replica
            for replica in self._replicas.values()
            if replica.ready and replica.breaker.allows and replica not in avoid
        ]
        if lora is not None:
            able = [replica for replica in able if replica.takes(lora)]
        if len(able) < 2:
            return able
        able = [replica for replica in able if not replica.engine.suspect] or able
        return [replica for replica in able if self._has_room(replica)] or able

    def _has_room(self, replica: Replica) -> bool:
        limit = self._limit(replica.engine.capabilities)
        return limit is None or replica.in_flight < limit

    async def configure(self, endpoints: Sequence[str]) -> None:
        """Makes `endpoints` the replicas: new ones join, others leave when they are idle.

        Each is ``host:port``, ``grpcs://host:port``, or a name as in `discovery`. Raises ValueError
        for one that is none of these; the replicas then stay as they are.
        """
        if self._lookup is not None:
            # It must not set the old addresses back while the new ones are looked at.
            self._lookup.cancel()
            await asyncio.wait([self._lookup])
            self._lookup = None
        self.configured = list(endpoints)
        found = await resolve(endpoints)
        if found is not None:
            await self._set(found)
        if any(is_name(endpoint) for endpoint in endpoints):
            self._lookup = asyncio.create_task(self._look_up())

    async def close(self) -> None:
        """Stops watching and closes all connections."""
        if self._lookup is not None:
            self._lookup.cancel()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*[self._end(replica) for replica in self])

    async def _look_up(self) -> None:
        while True:
            await asyncio.sleep(_LOOKUP_PERIOD_S)
            try:
                found = await resolve(self.configured)
                if found is not None:
                    await self._set(found)
            except Exception:  # whatever a name server answers, this must go on looking
                log.exception("looking up the replicas failed")

    async def _set(self, endpoints: list[str]) -> None:
        new = {e: Replica(e, self._make(e)) for e in endpoints if e not in self._replicas}
        for endpoint in [e for e in self._replicas if e not in endpoints]:
            replica = self._replicas.pop(endpoint)
            replica.leaving = True
            self._leaving.add(replica)
            log.info("replica %s leaves with %d requests", endpoint, replica.in_flight)
            self._released(replica)
        for endpoint, replica in new.items():
            log.info("replica %s joins", endpoint)
            replica.engine.draining = self._draining
            self._replicas[endpoint] = replica
            replica.watch = asyncio.create_task(self._watch(replica))
        # One look before anything is sent: with Triton up, the first request is served.
        await asyncio.gather(*[replica.engine.refresh() for replica in new.values()])

    async def _watch(self, replica: Replica) -> None:
        seen = asyncio.create_task(self._note_ready(replica))
        try:
            await replica.engine.watch()
        finally:
            seen.cancel()

    async def _note_ready(self, replica: Replica) -> None:
        await replica.engine.wait_ready()
        self._seen_ready.set()

    def _released(self, replica: Replica) -> None:
        """Ends a replica that has left once its last request has ended."""
        if replica.leaving and not replica.in_flight and replica in self._leaving:
            self._leaving.discard(replica)
            task = asyncio.get_running_loop().create_task(self._end(replica))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _end(self, replica: Replica) -> None:
        if replica.watch is not None:
            replica.watch.cancel()
        await replica.engine.close()
