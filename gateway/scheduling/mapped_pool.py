"""Which replica answers for a model beside the one that chats go to, and whose turn it is there.

Its health is a matter of its own: a model that fails must not take a replica from the chats, nor
the chats' model one from this. A call may be sent again, as it changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.errors import EngineBroken, EngineError, EngineUnavailable
from gateway.observability.request_context import RequestContext
from gateway.scheduling.admission import Admission
from gateway.scheduling.balancer import choose
from gateway.scheduling.breaker import Breaker
from gateway.scheduling.replica import Replica
from gateway.scheduling.replicas import Replicas
from gateway.triton.silence import SILENCE_S
from gateway.triton.tensor_mapping import InputRow, ResolvedMapping, Rows, TensorMapping

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_CALLS = 8
"""Of one model on each replica at once: the next ones are at hand when Triton has made a batch."""
# Where it was not: every request would ask again.
_LACKS_S = 2.0
# By as much at most uvloop ends a wait too early: its clock has milliseconds.
_EARLY_S = 0.001


@dataclass(eq=False, slots=True)
class _Place:
    """A model on a replica. All times are the event loop's."""

    replica: Replica
    breaker: Breaker = field(default_factory=lambda: Breaker(asyncio.get_running_loop().time))
    in_flight: int = 0
    model: ResolvedMapping | None = None
    lacks_until: float = 0.0
    answered_at: float = 0.0
    """When it last gave somebody an answer."""
    misfit: str = ""
    """What of the mapping does not fit the model there."""

    @property
    def endpoint(self) -> str:
        return self.replica.endpoint

    @property
    def weight(self) -> float:
        return self.replica.weight


class MappedPool:
    """Belongs to one event loop. `admission` makes what bounds the calls of one model."""

    def __init__(
        self, replicas: Replicas, admission: Callable[[Callable[[], int]], Admission]
    ) -> None:
        self._replicas = replicas
        self._make_admission = admission
        self._admissions: dict[str, Admission] = {}
        self._places: dict[tuple[Replica, TensorMapping], _Place] = {}

    @property
    def misfits(self) -> dict[str, str]:
        """Texts by model and replica: how a mapping differs from the model there."""
        return {
            f"{mapping.model} {place.endpoint}": f"{place.endpoint}: {place.misfit}"
            for (_, mapping), place in self._places.items()
            if place.misfit
        }

    def admission(self, model: str) -> Admission:
        """Whose turn it is to call a model, by its name in Triton; a place is a call."""
        if model not in self._admissions:
            self._admissions[model] = self._make_admission(self._calls)
        return self._admissions[model]

    def _calls(self) -> int:
        return _CALLS * max(1, sum(replica.takes_new for replica in self._replicas))

    async def model(self, mapping: TensorMapping) -> ResolvedMapping:
        """As one of the replicas has it. Raises EngineUnavailable where none does."""
        tried: list[_Place] = []
        return (await self._served(mapping, tried))[1]

    async def call(
        self,
        request: RequestContext,
        mapping: TensorMapping,
        rows: Sequence[InputRow],
        deadline: float,
    ) -> list[Rows]:
        """The answers to `rows`, in their order. Raises GatewayError, and TimeoutError from
        `deadline` on, which is in the event loop's time."""
        tried: list[_Place] = []
        while True:
            place, model = await self._served(mapping, tried)
            try:
                return await self._call(place, model, request, rows, deadline)
            except EngineUnavailable:
                tried.append(place)
                if len(tried) == _ATTEMPTS:
                    raise
            except EngineBroken as error:
                # What a model says of one request, which may be a stranger's doing.
                place.model = None
                raise EngineError(error.message) from error

    async def _call(
        self,
        place: _Place,
        model: ResolvedMapping,
        request: RequestContext,
        rows: Sequence[InputRow],
        deadline: float,
    ) -> list[Rows]:
        loop = asyncio.get_running_loop()
        began, probe = loop.time(), place.breaker.begin()
        engine, found = place.replica.engine, []
        request.replica = place.endpoint
        span = None if request.span is None else request.span.begin_unary_attempt(place.endpoint)
        metadata = request.parent if span is None else span.metadata
        place.in_flight += 1
        failed: type[BaseException] | None = None
        try:
            # As planned with another replica's, which may take more at once.
            for start in range(0, len(rows), model.rows):
                some = rows[start : start + model.rows]
                left = deadline - loop.time()
                if left <= 0:
                    raise TimeoutError
                reply = await engine.infer_once(model.request(some), left, metadata)
                place.answered_at = loop.time()
                found.append(model.answer(reply, len(some)))
        except BaseException as error:
            failed = type(error)
            if isinstance(error, EngineUnavailable):
                place.model = None
            now = loop.time()
            # At the deadline its caller mostly cancels it before it has timed out itself.
            late = isinstance(error, TimeoutError) or (
                isinstance(error, asyncio.CancelledError) and now > deadline - _EARLY_S
            )
            silent = now - max(began, place.answered_at) > SILENCE_S
            if isinstance(error, EngineUnavailable) or (late and silent):
                place.breaker.failed(began, probe=probe)
            else:
                place.breaker.undecided(probe=probe)
            raise
        else:
            place.breaker.succeeded()
            return found
        finally:
            place.in_flight -= 1
            if span is not None:
                span.end(failed)

    async def _served(
        self, mapping: TensorMapping, tried: list[_Place]
    ) -> tuple[_Place, ResolvedMapping]:
        """The next one that has the model; those that lack it are among `tried` then."""
        while True:
            place = self._pick(mapping, tried)
            if place.model is not None:
                return place, place.model
            try:
                place.model = await place.replica.engine.resolve_mapping(mapping)
                place.misfit = ""
            except (EngineUnavailable, EngineError) as error:
                place.lacks_until = asyncio.get_running_loop().time() + _LACKS_S
                place.misfit = error.message if isinstance(error, EngineError) else ""
                if place.misfit:
                    log.error("%s: %s", place.endpoint, place.misfit)
                tried.append(place)

    def _pick(self, mapping: TensorMapping, tried: Sequence[_Place]) -> _Place:
        """The least loaded of those that work. Raises EngineUnavailable, and EngineError where the
        mapping does not fit."""
        now = asyncio.get_running_loop().time()
        there = {replica for replica in self._replicas if not replica.leaving}
        for key in [key for key in self._places if key[0] not in there]:
            del self._places[key]
        places = [self._places.setdefault((r, mapping), _Place(r)) for r in there]
        able = [
            place
            for place in places
            if place not in tried
            and place.replica.drained_at is None
            and place.lacks_until <= now
            and place.breaker.allows
        ]
        # Its own model may be away, or loading, where this one is there.
        able = [place for place in able if place.replica.ready] or able
        able = [place for place in able if place.weight] or able
        misfit = next((p.misfit for p in places if p.misfit and p.lacks_until > now), "")
        if not able and misfit:
            raise EngineError(misfit)
        if not able:
            raise EngineUnavailable("The model is not available now; try again shortly.")
        return choose(able, None)
