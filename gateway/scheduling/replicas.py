"""The replicas of one model: kept in step with the configuration, chosen from, drained."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from gateway.errors import AdapterNotReady, EngineUnavailable
from gateway.generation import Generation
from gateway.observability.request_context import RequestContext
from gateway.scheduling.balancer import choose
from gateway.scheduling.cost import costs_of, key_of
from gateway.scheduling.discovery import Target, is_name, resolve
from gateway.scheduling.kinds import Kind, Kinds, Lane, differences
from gateway.scheduling.override import Overrides
from gateway.scheduling.places import Places
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.triton.engine import Engine
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.prefix_cache import PromptPrefixes
from gateway.triton.selection import ModelSelection

log = logging.getLogger(__name__)

# A pod's address is known a second after it is ready; name servers are asked no more often.
_LOOKUP_PERIOD_S = 2.0
# Replicas are looked at each second.
_BACK_WITHIN_S, _BACK_PERIOD_S = 3.0, 0.1


class Replicas:
    """All replicas of this gateway. Belongs to one event loop.

    `make` builds the engine of an endpoint; it raises ValueError for an endpoint that is none.
    """

    def __init__(
        self,
        make: Callable[[str], Engine],
        limit: Callable[[ModelCapabilities], int | None] = lambda _: None,
        *,
        drain_grace_s: float,
    ) -> None:
        """`limit` says how many requests a replica may have in flight, None without a limit. One
        that is drained, or leaves, keeps its streams for `drain_grace_s`."""
        self._make = make
        self._replicas: dict[str, Replica] = {}
        self._leaving: set[Replica] = set()
        self.places = Places(self.__iter__, limit)
        self.awaited: Callable[[], Collection[Lane]] = tuple
        """The lanes in which requests wait for a place."""
        self.configured: list[Target] = []
        """What `configure` was last told."""
        self._overrides: Overrides = {}
        self._targets: dict[str, Target] = {}
        self.lookup_problem = ""
        """What is configured, by the endpoint of a replica."""
        self._known_kinds = Kinds()
        self._kinds: tuple[Kind, ...] = ()
        self._lookup: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._seen_ready = asyncio.Event()
        self._draining = False
        self._drain_grace_s = drain_grace_s

    def __iter__(self) -> Iterator[Replica]:
        """Those that have left and still finish what they have, and those of the configuration.

        By endpoint the last one counts: it may be that of one that left, and is there again.
        """
        return iter([*self._leaving, *self._replicas.values()])

    @property
    def ready(self) -> bool:
        """Whether there is one for what comes now."""
        return any(replica.takes_new for replica in self._replicas.values())

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
    def kinds(self) -> Sequence[Kind]:
        """Those that a request which comes now is prepared for.

        Of what is away for a while, too: what it alone can take is not refused for that. Raises
        EngineUnavailable while none is ready.
        """
        if not self.ready:
            raise EngineUnavailable("The inference server is not ready.")
        return self._kinds

    @property
    def fingerprint(self) -> str:
        """Of the first that is ready."""
        ready = (r.engine.fingerprint for r in self._replicas.values() if r.takes_new)
        return next(ready, "")

    def is_served(self, forms: Collection[object]) -> bool:
        """Whether a replica of one of these kinds is ready."""
        return any(r.takes_new and r.kind in forms for r in self._replicas.values())

    def lane_of(self, generation: Generation) -> Lane:
        """The kinds that can take it now, as far as it is known which have its adapter."""
        if len(self._kinds) < 2:
            return None
        there = [replica for replica in self._replicas.values() if replica.takes_new]
        able = {replica.kind for replica in there if replica.takes(generation)}
        if not able:
            return frozenset(generation.forms)
        return None if all(replica.kind in able for replica in there) else frozenset(able)

    def has_other_than(
        self,
        tried: Collection[Replica],
        generation: Generation,
        came: float = math.inf,
        *,
        works: bool = False,
    ) -> bool:
        """Whether `pick` would find one that is none of `tried`; with `works` one that has
        not just failed others."""
        if works:
            there = [r for r in self._open_to(came, tried) if not r.breaker.open]
            return any(replica.takes(generation) for replica in there)
        return bool(self._candidates(tried, generation, came))

    async def until_other(
        self,
        tried: Collection[Replica],
        generation: Generation,
        deadline: float,
        came: float = math.inf,
    ) -> bool:
        """Whether there is one that is none of `tried`. What was away may be back in a moment, and
        is seen at the next look: that is waited for where its kind can take it."""
        loop = asyncio.get_running_loop()
        ends = min(deadline, loop.time() + _BACK_WITHIN_S)
        kinds = {None, *generation.forms}  # None: what was never seen may be any
        while not self.has_other_than(tried, generation, came):
            able = any(r not in tried and r.kind in kinds for r in self._replicas.values())
            if not able or loop.time() >= ends:
                return False
            await asyncio.sleep(_BACK_PERIOD_S)
        return True

    async def wait_until_back(self) -> None:
        """Return once one takes requests, or 3 s after the last one was lost or named.

        A look that fails says little: the next one, or another worker's, may succeed.
        """
        loop = asyncio.get_running_loop()
        while not self.ready:
            lost = [r.engine.lost_at for r in self._replicas.values() if r.drained_at is None]
            if loop.time() >= max(lost, default=-math.inf) + _BACK_WITHIN_S:
                return
            await asyncio.sleep(_BACK_PERIOD_S)

    def can_take(self, generation: Generation, came: float) -> bool:
        """Whether a request that `came` then need not wait for a replica to get its adapter.

        So it is, too, where none is ready whose kind can take it.
        """
        forms, there = generation.forms, self._open_to(came, failing=True)
        able = [replica for replica in there if not forms or replica.kind in forms]
        return not able or any(replica.takes(generation) for replica in able)

    @property
    def why_not_ready(self) -> str:
        """What was last seen of each replica."""
        if not self._replicas:
            names = ", ".join([target.endpoint for target in self.configured])
            return f"no address is known for {names}"
        return "; ".join(
            f"{r.endpoint} is drained" if r.ready else r.engine.why_not_ready
            for r in self._replicas.values()
        )

    @property
    def selections(self) -> list[ModelSelection]:
        """What is served, one for each kind. Raises EngineUnavailable while none is ready."""
        found = {
            replica.kind: replica.engine.selection
            for replica in reversed(self._replicas.values())
            if replica.takes_new
        }
        if not found:
            raise EngineUnavailable("The inference server is not ready.")
        return list(reversed(found.values()))

    @property
    def capabilities(self) -> list[ModelCapabilities]:
        """As `selections`."""
        return [selection.capabilities for selection in self.selections]

    async def wait_ready(self) -> None:
        """Returns once one of them has been seen serving."""
        await self._seen_ready.wait()

    def pick(
        self,
        request: RequestContext,
        generation: Generation,
        prefixes: PromptPrefixes | None = None,
        avoid: Collection[Replica] = (),
        came: float = math.inf,
    ) -> ReplicaLease:
        """A place on a replica that works, can take it, has its adapter and is none of `avoid`.

        Without `prefixes` nothing that is known of caches counts. `came` is when the request came,
        in the event loop's time. Raises EngineUnavailable when there is none, and AdapterNotReady
        when all of them lack the adapter.
        """
        candidates = self._candidates(avoid, generation, came)
        if not candidates:
            lora = generation.params.lora
            if lora is not None and any(self._open_to(came, avoid)):
                raise AdapterNotReady(f"The model `{lora.name}` is not there; try again shortly.")
            raise EngineUnavailable("No inference server is available; try again shortly.")
        lane = self.lane_of(generation)
        chosen = candidates[0]
        if len(candidates) > 1:
            key = key_of(generation, prefixes)
            chosen = choose(candidates, key, costs_of(candidates, generation, prefixes))
        return ReplicaLease(chosen, request, self._released, lane, prefixes)

    def _open_to(
        self, came: float, avoid: Collection[Replica] = (), *, failing: bool = False
    ) -> Iterator[Replica]:
        """Those that work, or else seem to; with `failing` those, too, that are left alone for a
        while. A drained one keeps what came before."""
        for replica in self._replicas.values():
            works = replica.ready and (failing or replica.breaker.allows)
            if (
                works
                and replica not in avoid
                and (replica.drained_at is None or came < replica.drained_at)
            ):
                yield replica

    def _candidates(
        self, avoid: Collection[Replica], generation: Generation, came: float
    ) -> list[Replica]:
        """Of those that can take it the ones with a weight, or else all; of these the ones with
        room, or else all."""
        able = [r for r in self._open_to(came, avoid) if r.takes(generation)]
        if not able and avoid:
            # Another one has just failed it. One without a weight may have failed long ago, and had
            # no request since that could show that it works again.
            able = [r for r in self._open_to(came, avoid, failing=True) if r.takes(generation)]
        if len(able) < 2:
            return able
        able = [replica for replica in able if replica.drained_at is None] or able
        able = [replica for replica in able if replica.weight] or able
        able = [replica for replica in able if not replica.engine.suspect] or able
        roomy = [replica for replica in able if self.places.has_room(replica)] or able
        if awaited := self.awaited():
            # What others can take leaves the next free place to who can have no other.
            roomy = [r for r in roomy if not self._is_awaited(r, awaited, generation)] or roomy
        return roomy

    @staticmethod
    def _is_awaited(replica: Replica, lanes: Collection[Lane], generation: Generation) -> bool:
        """Whether somebody waits for it who can be served by fewer kinds than this can."""
        return any(
            lane is not None and replica.kind in lane and lane < generation.forms.keys()
            for lane in lanes
        )

    async def configure(self, targets: Sequence[Target]) -> None:
        """Makes `targets` the replicas: new ones join, others leave when they are idle, and those
        that stay have the weight that they are given.

        Each is ``host:port``, ``grpcs://host:port``, or a name as in `discovery`. Raises ValueError
        for one that is none of these; the replicas then stay as they are.
        """
        if self._lookup is not None:
            # It must not set the old addresses back while the new ones are looked at.
            self._lookup.cancel()
            await asyncio.wait([self._lookup])
            self._lookup = None
        self.configured = list(targets)
        await self._set(*await resolve(targets))
        if any(is_name(target.endpoint) for target in targets):
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
                await self._set(*await resolve(self.configured))
            except Exception:  # whatever a name server answers, this must go on looking
                log.exception("looking up the replicas failed")

    async def _set(self, targets: Mapping[str, Target], away: bool) -> None:
        """`away` says that there may be others, so that none leaves."""
        self._targets = {**(self._targets if away else {}), **targets}
        kept = "names of replicas cannot be looked up now: the addresses that were known stay"
        self.lookup_problem = kept if away else ""
        targets = {
            endpoint: self._effective(target, endpoint) for endpoint, target in targets.items()
        }
        new = {e: Replica(e, self._make(e)) for e in targets if e not in self._replicas}
        for endpoint in [e for e in self._replicas if e not in targets and not away]:
            replica = self._replicas.pop(endpoint)
            replica.leaving = True
            replica.send_away(self._drain_grace_s)
            self._leaving.add(replica)
            log.info("replica %s leaves with %d requests", endpoint, replica.in_flight)
            self._released(replica)
        for replica in self._leaving:
            again = targets.get(replica.endpoint)
            if again is not None and not again.drain:
                replica.keep()  # it is still there, and has no reason to have less to do
            elif not away:
                replica.send_away(self._drain_grace_s)
        for endpoint, replica in new.items():
            log.info("replica %s joins", endpoint)
            replica.engine.draining = self._draining
            replica.engine.lost_at = asyncio.get_running_loop().time()
            replica.engine.on_selection = self._look_at_kinds
            replica.engine.silence.replaceable = partial(self._replaceable, replica)
            self._replicas[endpoint] = replica
            replica.watch = asyncio.create_task(self._watch(replica))
        for endpoint, target in targets.items():
            self._weigh(self._replicas[endpoint], target)
        self._look_at_kinds()
        # One look before anything is sent: with Triton up, the first request is served.
        await asyncio.gather(*[replica.engine.refresh() for replica in new.values()])

    def override(self, overrides: Overrides) -> None:
        """From now on they hold, and those that are not among them do not."""
        self._overrides = overrides
        for endpoint, replica in self._replicas.items():
            self._weigh(replica, self._effective(self._targets[endpoint], endpoint))
        self._look_at_kinds()

    def _effective(self, target: Target, endpoint: str) -> Target:
        override = self._overrides.get(endpoint)
        return target if override is None else override.of(target)

    def _weigh(self, replica: Replica, target: Target) -> None:
        if replica.weight != target.weight:
            log.info("replica %s has weight %g now", replica.endpoint, target.weight)
        replica.weight = target.weight
        if target.drain is (replica.drained_at is not None):
            return
        if target.drain:
            replica.drained_at = asyncio.get_running_loop().time()
            replica.send_away(self._drain_grace_s)
            log.info("replica %s is drained of %d requests", replica.endpoint, replica.in_flight)
        else:
            replica.drained_at = None
            replica.keep()
            log.info("replica %s takes requests again", replica.endpoint)

    def _look_at_kinds(self) -> None:
        """Which kinds there are, and, where they are several from now on, what that means."""
        for replica in self._replicas.values():
            if (seen := replica.engine.last_selection) is not None:
                replica.kind = self._known_kinds.of(seen.capabilities)
        stay = [r.kind for r in self._replicas.values() if r.drained_at is None]
        before, kinds = self._kinds, tuple(dict.fromkeys([kind for kind in stay if kind]))
        self._kinds = kinds
        if len(kinds) > 1 and set(kinds) != set(before):
            log.info("the replicas are of %d kinds; %s", len(kinds), "; ".join(differences(kinds)))

    async def _watch(self, replica: Replica) -> None:
        seen = asyncio.create_task(self._note_ready(replica))
        try:
            await replica.engine.watch()
        finally:
            seen.cancel()

    async def _note_ready(self, replica: Replica) -> None:
        await replica.engine.wait_ready()
        self._seen_ready.set()

    def _replaceable(self, replica: Replica) -> bool:
        """Whether one that answers can go on with what this one has begun: with ids, that is."""
        kind = replica.kind
        if kind is None or kind.capabilities.text is not None or not replica.in_flight:
            return False
        others = (other for other in self._replicas.values() if other is not replica)
        return any(
            other.kind is kind
            and other.takes_new
            and not other.engine.suspect
            and not other.breaker.open
            for other in others
        )

    def _released(self, replica: Replica) -> None:
        """Ends a replica that has left once its last request has ended."""
        if replica.leaving and not replica.in_flight and replica in self._leaving:
            self._leaving.discard(replica)
            task = asyncio.get_running_loop().create_task(self._end(replica))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _end(self, replica: Replica) -> None:
        replica.keep()
        if replica.watch is not None:
            replica.watch.cancel()
        await replica.engine.close()
