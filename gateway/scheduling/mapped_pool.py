"""Calls of embedding and ranking models: admission, choice of a replica, and failover.

Each model on each replica has its own circuit breaker. If the embedding model of a replica fails,
the replica still gets chat requests, and vice versa. Calls of these models have no side effects, so
a failed call is repeated on another replica. These models are called "mapped models", because the
configuration file maps the input and output of each model to tensors in Triton (`TensorMapping`).

See decision 005 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.errors import EngineBroken, EngineError, EngineUnavailable
from gateway.observability.request_context import RequestContext
from gateway.scheduling.balancer import choose
from gateway.scheduling.breaker import Breaker
from gateway.scheduling.fair_budget import FairBudget
from gateway.scheduling.replica import Replica
from gateway.scheduling.replicas import Replicas
from gateway.triton.silence import SILENCE_S
from gateway.triton.tensor_mapping import InputRow, ResolvedMapping, Rows, TensorMapping

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_MAX_CALLS_PER_REPLICA = 8
"""Maximum number of concurrent calls of one model on each replica.

Several calls per replica keep Triton busy: when Triton has finished a batch of calls, the next
calls are already in its queue.
"""
# Seconds after which a replica that lacks the model is asked for the model's configuration again.
# Without this pause, every request would ask the replica.
_MISSING_RETRY_S = 2.0
# Seconds by which a timer of uvloop may fire too early, because uvloop's clock has a resolution of
# 1 ms.
_TIMER_SLACK_S = 0.001


@dataclass(eq=False, slots=True)
class _ReplicaModel:
    """A mapped model on one replica. Times are in seconds of the event loop's clock."""

    replica: Replica
    breaker: Breaker = field(default_factory=lambda: Breaker(asyncio.get_running_loop().time))
    in_flight: int = 0
    model: ResolvedMapping | None = None
    lacks_until: float = 0.0
    answered_at: float = 0.0
    """Time of the model's last answer."""
    misfit: str = ""
    """Why the configured mapping does not fit the model on this replica; empty if it fits."""

    @property
    def endpoint(self) -> str:
        return self.replica.endpoint

    @property
    def weight(self) -> float:
        return self.replica.weight


class MappedPool:
    """Caller of the embedding and ranking models on all replicas.

    Not thread-safe: use an instance in one event loop only.
    """

    def __init__(
        self, replicas: Replicas, admission: Callable[[Callable[[], int]], FairBudget]
    ) -> None:
        """Create the pool. A model is added when it is called for the first time.

        Args:
            replicas: the replicas to choose from.
            admission: builds the admission control of one model, which limits the concurrent calls
                of the model. Its argument is a function that returns this limit.
        """
        self._replicas = replicas
        self._make_admission = admission
        self._admissions: dict[str, FairBudget] = {}
        self._by_replica: dict[tuple[Replica, TensorMapping], _ReplicaModel] = {}

    @property
    def misfits(self) -> dict[str, str]:
        """Error texts for models in Triton that do not fit their configured `TensorMapping`.

        Each key consists of the model's name, a space and the replica's endpoint.
        """
        return {
            f"{mapping.model} {target.endpoint}": f"{target.endpoint}: {target.misfit}"
            for (_, mapping), target in self._by_replica.items()
            if target.misfit
        }

    def admission(self, model: str) -> FairBudget:
        """Return the admission control of a model. It limits the number of concurrent calls.

        `model` is the model's name in Triton.
        """
        if model not in self._admissions:
            self._admissions[model] = self._make_admission(self._max_calls)
        return self._admissions[model]

    def _max_calls(self) -> int:
        return _MAX_CALLS_PER_REPLICA * max(
            1, sum(replica.accepts_new for replica in self._replicas)
        )

    async def model(self, mapping: TensorMapping) -> ResolvedMapping:
        """Return the mapping and the model's configuration, which an available replica sent.

        Raises:
            EngineUnavailable: no available replica serves the model.
            EngineError: the mapping does not fit the model.
        """
        tried: list[_ReplicaModel] = []
        return (await self._find_model(mapping, tried))[1]

    async def call(
        self,
        request: RequestContext,
        mapping: TensorMapping,
        rows: Sequence[InputRow],
        deadline: float,
    ) -> list[Rows]:
        """Run the model on the input rows, and return the output rows in the same order.

        Args:
            request: the request's context; this method sets `request.replica` to the endpoint in
                use.
            mapping: the model and its tensors.
            rows: the input rows.
            deadline: time at which the call must be done, in seconds of the event loop's clock.

        Raises:
            GatewayError: no replica can answer.
            TimeoutError: the deadline has passed.
        """
        tried: list[_ReplicaModel] = []
        while True:
            target, model = await self._find_model(mapping, tried)
            try:
                return await self._call(target, model, request, rows, deadline)
            except EngineUnavailable:
                tried.append(target)
                if len(tried) == _MAX_ATTEMPTS:
                    raise
            except EngineBroken as error:
                # Raise a plain EngineError, because only this model failed, not the engine of the
                # replica. Also forget the resolved mapping, because the model may have been
                # replaced. The next call then reads the model's configuration again.
                target.model = None
                raise EngineError(error.message) from error

    async def _call(
        self,
        target: _ReplicaModel,
        model: ResolvedMapping,
        request: RequestContext,
        rows: Sequence[InputRow],
        deadline: float,
    ) -> list[Rows]:
        loop = asyncio.get_running_loop()
        began, probe = loop.time(), target.breaker.begin()
        engine, found = target.replica.engine, []
        request.replica = target.endpoint
        span = None if request.span is None else request.span.begin_unary_attempt(target.endpoint)
        metadata = request.parent if span is None else span.metadata
        target.in_flight += 1
        failed: type[BaseException] | None = None
        try:
            # Split the rows into calls of at most `model.rows` rows. The caller sized the batch for
            # another replica, whose model may accept more rows in a call.
            for start in range(0, len(rows), model.rows):
                some = rows[start : start + model.rows]
                left = deadline - loop.time()
                if left <= 0:
                    raise TimeoutError
                reply = await engine.infer_once(model.request(some), left, metadata)
                target.answered_at = loop.time()
                found.append(model.answer(reply, len(some)))
        except BaseException as error:
            failed = type(error)
            if isinstance(error, EngineUnavailable):
                target.model = None
            now = loop.time()
            # Count a cancellation at the deadline as a timeout. The caller usually cancels this
            # task just before the timeout of the gRPC call fires.
            late = isinstance(error, TimeoutError) or (
                isinstance(error, asyncio.CancelledError) and now > deadline - _TIMER_SLACK_S
            )
            silent = now - max(began, target.answered_at) > SILENCE_S
            if isinstance(error, EngineUnavailable) or (late and silent):
                target.breaker.record_failure(began, probe=probe)
            else:
                target.breaker.record_unknown(probe=probe)
            raise
        else:
            target.breaker.record_success()
            return found
        finally:
            target.in_flight -= 1
            if span is not None:
                span.end(failed)

    async def _find_model(
        self, mapping: TensorMapping, tried: list[_ReplicaModel]
    ) -> tuple[_ReplicaModel, ResolvedMapping]:
        """Return a replica that serves the model, and the mapping resolved for this replica.

        Replicas without the model are added to `tried`, and another replica is asked.
        """
        while True:
            target = self._pick(mapping, tried)
            if target.model is not None:
                return target, target.model
            try:
                target.model = await target.replica.engine.resolve_mapping(mapping)
                target.misfit = ""
            except (EngineUnavailable, EngineError) as error:
                target.lacks_until = asyncio.get_running_loop().time() + _MISSING_RETRY_S
                target.misfit = error.message if isinstance(error, EngineError) else ""
                if target.misfit:
                    log.error("%s: %s", target.endpoint, target.misfit)
                tried.append(target)

    def _pick(self, mapping: TensorMapping, tried: Sequence[_ReplicaModel]) -> _ReplicaModel:
        """Return the least loaded working replica that is not in `tried`.

        Raises:
            EngineUnavailable: no replica is available.
            EngineError: the mapping does not fit the model.
        """
        now = asyncio.get_running_loop().time()
        there = {replica for replica in self._replicas if not replica.leaving}
        for key in [key for key in self._by_replica if key[0] not in there]:
            del self._by_replica[key]
        targets = [self._by_replica.setdefault((r, mapping), _ReplicaModel(r)) for r in there]
        able = [
            target
            for target in targets
            if target not in tried
            and target.replica.drained_at is None
            and target.lacks_until <= now
            and target.breaker.allows
        ]
        # Prefer ready replicas. Otherwise try the other replicas: a replica counts as not ready
        # while its text model is loading, but it may serve this model already.
        able = [target for target in able if target.replica.ready] or able
        able = [target for target in able if target.weight] or able
        misfit = next((p.misfit for p in targets if p.misfit and p.lacks_until > now), "")
        if not able and misfit:
            raise EngineError(misfit)
        if not able:
            raise EngineUnavailable("The model is not available now; try again shortly.")
        return choose(able, None)
