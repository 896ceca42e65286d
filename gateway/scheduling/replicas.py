"""Set of replicas of the gateway's model: configuration, drains, and choice of a replica."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from gateway.errors import AdapterNotReady, EngineUnavailable
from gateway.generation.engine_request import Generation
from gateway.observability.request_context import RequestContext
from gateway.scheduling.balancer import choose
from gateway.scheduling.cost import affinity_key, estimate_costs
from gateway.scheduling.discovery import Target, is_name, resolve
from gateway.scheduling.kinds import Lane, ModelVariant, VariantRegistry, describe_differences
from gateway.scheduling.override import Overrides
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.scheduling.slot_pool import SlotPool
from gateway.triton.engine import Engine
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.prefix_cache import PromptPrefixes
from gateway.triton.selection import ModelSelection

log = logging.getLogger(__name__)

# Interval of DNS lookups. Kubernetes publishes a pod's address about a second after the pod is
# ready, so more lookups would gain nothing.
_LOOKUP_PERIOD_S = 2.0
# Seconds for which a request waits for an unavailable replica. Each replica is polled once a
# second, so this covers a few polls.
_RECOVERY_WAIT_S = 3.0
_RECOVERY_POLL_S = 0.1
# Maximum number of a tenant's requests that wait for a replica to come back.
_MAX_RETURNING_PER_TENANT = 64


class Replicas:
    """All replicas to which this gateway sends requests.

    Not thread-safe: use an instance in one event loop only.
    """

    def __init__(
        self,
        make: Callable[[str], Engine],
        limit: Callable[[ModelCapabilities], int | None] = lambda _: None,
        *,
        drain_grace_s: float,
    ) -> None:
        """Start without replicas.

        Args:
            make: builds the engine of an endpoint; raises ValueError for an invalid endpoint.
            limit: returns how many requests a replica may have in flight, None without a limit.
            drain_grace_s: seconds after which streams migrate from a drained or leaving replica.
        """
        self._make = make
        self._replicas: dict[str, Replica] = {}
        self._returning: Counter[str] = Counter()
        """Number of requests in `wait_until_back`, by tenant."""
        self._leaving: set[Replica] = set()
        self.slots = SlotPool(self.__iter__, limit)
        self.queued_lanes: Callable[[], Collection[Lane]] = tuple
        """Function that returns the lanes (see `kinds.Lane`) of all queued requests."""
        self.configured: list[Target] = []
        """Targets of the last call of `configure`. DNS names in them are not resolved."""
        self._overrides: Overrides = {}
        self._targets: dict[str, Target] = {}
        """Configured target of each replica by endpoint, before overrides are applied."""
        self.lookup_problem = ""
        """Why DNS lookups of replicas fail now, as a text for operators; "" if they succeed."""
        self._known_variants = VariantRegistry()
        self._variants: tuple[ModelVariant, ...] = ()
        self._lookup: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._seen_ready = asyncio.Event()
        self._draining = False
        self._drain_grace_s = drain_grace_s

    def __iter__(self) -> Iterator[Replica]:
        """Iterate over all replicas: first the leaving replicas, then the configured replicas.

        A leaving replica is included until its last request has ended. If an endpoint was removed
        and added again, a leaving and a configured replica may have the same endpoint. The
        configured replica then comes last.
        """
        return iter([*self._leaving, *self._replicas.values()])

    @property
    def ready(self) -> bool:
        """True if some replica accepts new requests."""
        return any(replica.accepts_new for replica in self._replicas.values())

    @property
    def has_several(self) -> bool:
        """True if more than one replica is configured."""
        return len(self._replicas) > 1

    @property
    def draining(self) -> bool:
        """True while the gateway shuts down. A call cancelled now counts as ended by it."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for replica in self:
            replica.engine.draining = value

    @property
    def variants(self) -> Sequence[ModelVariant]:
        """Model variants of all replicas that are not drained.

        A new request is prepared for each of these variants (see `Generation.forms`). Variants of
        unavailable replicas are included. Otherwise, a request that only unavailable replicas can
        run would be rejected as unsupported. Raises EngineUnavailable while no replica accepts new
        requests.
        """
        if not self.ready:
            raise EngineUnavailable("The inference server is not ready.")
        return self._variants

    @property
    def fingerprint(self) -> str:
        """Model fingerprint of the first replica that accepts new requests; "" if there is none."""
        ready = (r.engine.fingerprint for r in self._replicas.values() if r.accepts_new)
        return next(ready, "")

    def is_served(self, forms: Collection[object]) -> bool:
        """Return True if a replica of one of these model variants accepts new requests."""
        return any(r.accepts_new and r.variant in forms for r in self._replicas.values())

    def lane_of(self, generation: Generation) -> Lane:
        """Return the set of model variants that can run a generation now, or None for all variants.

        Return None also if the gateway knows fewer than two variants. If no replica can run the
        generation now, return all variants in `generation.forms`.
        """
        if len(self._variants) < 2:
            return None
        there = [replica for replica in self._replicas.values() if replica.accepts_new]
        able = {replica.variant for replica in there if replica.can_serve(generation)}
        if not able:
            return frozenset(generation.forms)
        return None if all(replica.variant in able for replica in there) else frozenset(able)

    def has_other(
        self,
        tried: Collection[Replica],
        generation: Generation,
        came: float = math.inf,
        *,
        works: bool = False,
    ) -> bool:
        """Return True if a replica outside `tried` can run the generation now.

        Args:
            tried: replicas to exclude.
            generation: the generation that the replica must be able to run.
            came: arrival time of the request, in seconds of the event loop's clock.
            works: True to exclude replicas whose circuit breaker is open.
        """
        if works:
            there = [r for r in self._find_working(came, tried) if not r.breaker.is_open]
            return any(replica.can_serve(generation) for replica in there)
        return bool(self._find_candidates(tried, generation, came))

    async def wait_for_other(
        self,
        tried: Collection[Replica],
        generation: Generation,
        deadline: float,
        came: float = math.inf,
    ) -> bool:
        """Wait until a replica outside `tried` can run the generation. Return False on a timeout.

        Wait until `deadline`, but for at most 3 s: this is long enough for several polls of an
        unavailable replica. Return False at once if no configured replica has a suitable model
        variant.
        """
        loop = asyncio.get_running_loop()
        ends = min(deadline, loop.time() + _RECOVERY_WAIT_S)
        variants = {None, *generation.forms}  # None: an unseen replica may be of any variant
        while not self.has_other(tried, generation, came):
            able = any(r not in tried and r.variant in variants for r in self._replicas.values())
            if not able or loop.time() >= ends:
                return False
            await asyncio.sleep(_RECOVERY_POLL_S)
        return True

    async def wait_until_back(self, tenant: str) -> None:
        """Wait until a replica accepts new requests, or return after a timeout.

        The method waits until 3 s after the last time that a replica became unavailable or was
        added. Within this time, the replica may answer a poll, and the request need not fail.
        Return at once if many requests of this tenant wait already, as each of them polls.
        """
        if self.ready or self._returning[tenant] >= _MAX_RETURNING_PER_TENANT:
            return
        loop = asyncio.get_running_loop()
        self._returning[tenant] += 1
        try:
            while not self.ready:
                lost = [r.engine.lost_at for r in self._replicas.values() if r.drained_at is None]
                if loop.time() >= max(lost, default=-math.inf) + _RECOVERY_WAIT_S:
                    return
                await asyncio.sleep(_RECOVERY_POLL_S)
        finally:
            self._returning[tenant] -= 1
            self._returning += Counter()  # drop tenants with a count of 0

    def can_take(self, generation: Generation, came: float) -> bool:
        """Return False if the generation has to wait until its adapter is copied to a replica.

        Return True if no replica of a suitable model variant is ready: waiting would not help.
        `came` is the arrival time of the request, in seconds of the event loop's clock.
        """
        forms, there = generation.forms, self._find_working(came, failing=True)
        able = [replica for replica in there if not forms or replica.variant in forms]
        return not able or any(replica.can_serve(generation) for replica in able)

    @property
    def why_not_ready(self) -> str:
        """Text for operators that says for each replica why the replica accepts no requests."""
        if not self._replicas:
            names = ", ".join([target.endpoint for target in self.configured])
            return f"no address is known for {names}"
        return "; ".join(
            f"{r.endpoint} is drained" if r.ready else r.engine.why_not_ready
            for r in self._replicas.values()
        )

    @property
    def selections(self) -> list[ModelSelection]:
        """The selected models in Triton: one selection for each model variant.

        Raises EngineUnavailable while no replica accepts new requests.
        """
        found = {
            replica.variant: replica.engine.selection
            for replica in reversed(self._replicas.values())
            if replica.accepts_new
        }
        if not found:
            raise EngineUnavailable("The inference server is not ready.")
        return list(reversed(found.values()))

    @property
    def capabilities(self) -> list[ModelCapabilities]:
        """Capabilities of the models in `selections`.

        Raises EngineUnavailable while no replica accepts new requests.
        """
        return [selection.capabilities for selection in self.selections]

    async def wait_ready(self) -> None:
        """Wait until some replica has been ready for the first time."""
        await self._seen_ready.wait()

    def pick(
        self,
        request: RequestContext,
        generation: Generation,
        prefixes: PromptPrefixes | None = None,
        avoid: Collection[Replica] = (),
        came: float = math.inf,
    ) -> ReplicaLease:
        """Choose a replica for a generation, and return a lease on the replica.

        The replica works, is not in `avoid`, and can run the generation. If there are several such
        replicas, `balancer.choose` chooses one by its estimated cost (see `cost`).

        Args:
            request: the request's context.
            generation: the generation to run.
            prefixes: hashes of the prompt's prefixes, to find replicas that have cached the prompt;
                None ignores prompt caches.
            avoid: replicas that must not be chosen.
            came: arrival time of the request, in seconds of the event loop's clock.

        Raises:
            EngineUnavailable: no replica is available.
            AdapterNotReady: all available replicas lack the adapter.
        """
        candidates = self._find_candidates(avoid, generation, came)
        if not candidates:
            lora = generation.params.lora
            if lora is not None and any(self._find_working(came, avoid)):
                raise AdapterNotReady(f"The model `{lora.name}` is not there; try again shortly.")
            raise EngineUnavailable("No inference server is available; try again shortly.")
        lane = self.lane_of(generation)
        chosen = candidates[0]
        if len(candidates) > 1:
            key = affinity_key(generation, prefixes)
            chosen = choose(candidates, key, estimate_costs(candidates, generation, prefixes))
        return ReplicaLease(chosen, request, self._close_if_idle, lane, prefixes)

    def _find_working(
        self, came: float, avoid: Collection[Replica] = (), *, failing: bool = False
    ) -> Iterator[Replica]:
        """Yield the ready replicas outside `avoid` that accept a request.

        `came` is the arrival time of the request: a drained replica accepts only requests that
        arrived before its drain. Replicas whose circuit breaker is open are included only if
        `failing` is True.
        """
        for replica in self._replicas.values():
            works = replica.ready and (failing or replica.breaker.allows)
            if (
                works
                and replica not in avoid
                and (replica.drained_at is None or came < replica.drained_at)
            ):
                yield replica

    def _find_candidates(
        self, avoid: Collection[Replica], generation: Generation, came: float
    ) -> list[Replica]:
        """Return the replicas from which the balancer chooses; empty if no replica is suitable.

        Five preferences reduce the list of replicas that can run the generation, in this order: the
        replica is not drained, has a positive weight, has answered its last poll, has a free slot,
        and is not needed by a queued request. A preference that none of the remaining replicas
        meets is ignored.
        """
        able = [r for r in self._find_working(came, avoid) if r.can_serve(generation)]
        if not able and avoid:
            # No replica with a closed circuit breaker is left for this request, so try replicas
            # with an open breaker, too. Such a replica may work again: its breaker remains open
            # until a request succeeds. A replica of weight 0 rarely gets a request.
            able = [
                r for r in self._find_working(came, avoid, failing=True) if r.can_serve(generation)
            ]
        if len(able) < 2:
            return able
        able = [replica for replica in able if replica.drained_at is None] or able
        able = [replica for replica in able if replica.weight] or able
        able = [replica for replica in able if not replica.engine.suspect] or able
        roomy = [replica for replica in able if self.slots.has_free_slot(replica)] or able
        if awaited := self.queued_lanes():
            # Leave a replica to a queued request that can run on fewer variants than `generation`.
            roomy = [
                r for r in roomy if not self._is_needed_by_queue(r, awaited, generation)
            ] or roomy
        return roomy

    @staticmethod
    def _is_needed_by_queue(
        replica: Replica, lanes: Collection[Lane], generation: Generation
    ) -> bool:
        """Return True if this replica should be left to a queued request.

        A queued request needs the replica more than `generation` if the queued request can run on
        this replica, too, but on fewer model variants than `generation`.

        Args:
            replica: a replica that can run `generation`.
            lanes: the lanes with queued requests.
            generation: the generation that is to be sent now.
        """
        return any(
            lane is not None and replica.variant in lane and lane < generation.forms.keys()
            for lane in lanes
        )

    async def configure(self, targets: Sequence[Target]) -> None:
        """Add new replicas, remove replicas that are not in `targets`, and set weights and drains.

        Removed replicas finish their requests first. Each endpoint is ``host:port``,
        ``grpcs://host:port``, or a DNS name (see `discovery`). Raise ValueError for an invalid
        endpoint, without changing any replica.
        """
        if self._lookup is not None:
            # Cancel the running lookup: it would restore the old addresses.
            self._lookup.cancel()
            await asyncio.wait([self._lookup])
            self._lookup = None
        self.configured = list(targets)
        await self._apply_targets(*await resolve(targets))
        if any(is_name(target.endpoint) for target in targets):
            self._lookup = asyncio.create_task(self._poll_names())

    async def close(self) -> None:
        """Stop polling replicas and names, and close all connections to replicas."""
        if self._lookup is not None:
            self._lookup.cancel()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*[self._end(replica) for replica in self])

    async def _poll_names(self) -> None:
        while True:
            await asyncio.sleep(_LOOKUP_PERIOD_S)
            try:
                await self._apply_targets(*await resolve(self.configured))
            except Exception:  # continue with the next lookup after any error
                log.exception("looking up the replicas failed")

    async def _apply_targets(self, targets: Mapping[str, Target], away: bool) -> None:
        """Add, remove and update replicas.

        Args:
            targets: the targets by endpoint, as `resolve` returns them.
            away: True if the lookup of some name failed. `targets` is then incomplete, so no
                replica is removed.
        """
        self._targets = {**(self._targets if away else {}), **targets}
        problem = "names of replicas cannot be looked up now: the addresses that were known stay"
        self.lookup_problem = problem if away else ""
        targets = {
            endpoint: self._apply_override(target, endpoint) for endpoint, target in targets.items()
        }
        new = {e: Replica(e, self._make(e)) for e in targets if e not in self._replicas}
        for endpoint in [e for e in self._replicas if e not in targets and not away]:
            replica = self._replicas.pop(endpoint)
            replica.leaving = True
            replica.schedule_migration(self._drain_grace_s)
            self._leaving.add(replica)
            log.info("replica %s leaves with %d requests", endpoint, replica.in_flight)
            self._close_if_idle(replica)
        for replica in self._leaving:
            again = targets.get(replica.endpoint)
            if again is not None and not again.drain:
                # the endpoint is configured again, so let its streams stay
                replica.cancel_migration()
            elif not away:
                replica.schedule_migration(self._drain_grace_s)
        for endpoint, replica in new.items():
            log.info("replica %s joins", endpoint)
            replica.engine.draining = self._draining
            replica.engine.lost_at = asyncio.get_running_loop().time()
            replica.engine.on_selection = self._update_variants
            replica.engine.silence.replaceable = partial(self._is_replaceable, replica)
            self._replicas[endpoint] = replica
            replica.watch = asyncio.create_task(self._watch(replica))
        for endpoint, target in targets.items():
            self._configure_replica(self._replicas[endpoint], target)
        self._update_variants()
        # Poll the new replicas once before returning. Otherwise they would count as not ready, and
        # the first request would fail.
        await asyncio.gather(*[replica.engine.refresh() for replica in new.values()])

    def set_overrides(self, overrides: Overrides) -> None:
        """Replace all overrides of weights and drains, and apply them to the replicas."""
        self._overrides = overrides
        for endpoint, replica in self._replicas.items():
            self._configure_replica(
                replica, self._apply_override(self._targets[endpoint], endpoint)
            )
        self._update_variants()

    def _apply_override(self, target: Target, endpoint: str) -> Target:
        override = self._overrides.get(endpoint)
        return target if override is None else override.apply_to(target)

    def _configure_replica(self, replica: Replica, target: Target) -> None:
        """Set the weight and the drain of a replica, and log what has changed."""
        if replica.weight != target.weight:
            log.info("replica %s has weight %g now", replica.endpoint, target.weight)
        replica.weight = target.weight
        if target.drain is (replica.drained_at is not None):
            return
        if target.drain:
            replica.drained_at = asyncio.get_running_loop().time()
            replica.schedule_migration(self._drain_grace_s)
            log.info("replica %s is drained of %d requests", replica.endpoint, replica.in_flight)
        else:
            replica.drained_at = None
            replica.cancel_migration()
            log.info("replica %s takes requests again", replica.endpoint)

    def _update_variants(self) -> None:
        """Update the model variants. If their combination is new, log how they differ."""
        for replica in self._replicas.values():
            if (seen := replica.engine.last_selection) is not None:
                replica.variant = self._known_variants.find_or_add(seen.capabilities)
        stay = [r.variant for r in self._replicas.values() if r.drained_at is None]
        before, variants = (
            self._variants,
            tuple(dict.fromkeys([variant for variant in stay if variant])),
        )
        self._variants = variants
        if len(variants) > 1 and set(variants) != set(before):
            log.info(
                "the replicas are of %d kinds; %s",
                len(variants),
                "; ".join(describe_differences(variants)),
            )

    async def _watch(self, replica: Replica) -> None:
        seen = asyncio.create_task(self._note_ready(replica))
        try:
            await replica.engine.watch()
        finally:
            seen.cancel()

    async def _note_ready(self, replica: Replica) -> None:
        await replica.engine.wait_ready()
        self._seen_ready.set()

    def _is_replaceable(self, replica: Replica) -> bool:
        """Return True if another working replica can resume the answers of `replica`.

        Answers can be resumed only with a model that takes token ids.
        """
        variant = replica.variant
        if variant is None or variant.capabilities.text is not None or not replica.in_flight:
            return False
        others = (other for other in self._replicas.values() if other is not replica)
        return any(
            other.variant is variant
            and other.accepts_new
            and not other.engine.suspect
            and not other.breaker.is_open
            for other in others
        )

    def _close_if_idle(self, replica: Replica) -> None:
        """Close a leaving replica if its last request has ended."""
        if replica.leaving and not replica.in_flight and replica in self._leaving:
            self._leaving.discard(replica)
            task = asyncio.get_running_loop().create_task(self._end(replica))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _end(self, replica: Replica) -> None:
        replica.cancel_migration()
        if replica.watch is not None:
            replica.watch.cancel()
        await replica.engine.close()
