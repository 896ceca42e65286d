"""A Triton replica with its load and health, and `ReplicaLease` for each request on a replica.

See decision 080 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from gateway.errors import EngineBroken, EngineSilent, EngineUnavailable
from gateway.generation.engine_request import Generation
from gateway.observability.request_context import RequestContext
from gateway.scheduling.breaker import Breaker
from gateway.scheduling.discovery import DEFAULT_WEIGHT
from gateway.scheduling.kinds import Lane, ModelVariant
from gateway.triton.engine import Engine
from gateway.triton.prefix_cache import PromptPrefixes
from gateway.triton.transport import Metadata

if TYPE_CHECKING:
    from gateway.observability.tracing import AttemptSpan


class LastFailure(NamedTuple):
    """Last failure of a replica. `at` is its time in seconds since 1970, `why` the error text."""

    at: float
    why: str


@dataclass(eq=False, slots=True)
class Replica:
    """A Triton server, with its load, weight and health. Replicas are compared by identity.

    Requests are distributed in proportion to `weight`. A replica of weight 0 gets a request only if
    no other replica can run the request. A drained replica gets no request that arrived after the
    start of the drain. A replica that is `leaving` finishes its requests and gets no new requests.
    """

    endpoint: str
    engine: Engine
    breaker: Breaker = field(default_factory=Breaker)
    weight: float = DEFAULT_WEIGHT
    drained_at: float | None = None
    """Start of the drain, in seconds of the event loop's clock; None if not drained."""
    variant: ModelVariant | None = None
    """The replica's model variant; None until a poll has found a model on the replica."""
    in_flight: int = 0
    lanes: Counter[Lane] = field(default_factory=Counter)
    """Number of requests in flight by lane. The lane None (all model variants) is left out."""
    requests: int = 0
    """Number of requests sent so far."""
    waiting_tokens: float = 0.0
    """Estimated number of uncached prompt tokens of requests that wait for their first token.

    Not estimated while the gateway has a single replica; the value is then 0.
    """
    leaving: bool = False
    is_migrating: bool = False
    """True if streams on this replica should now migrate to other replicas.

    Streams that cannot be resumed remain.
    """
    migration_timer: asyncio.TimerHandle | None = None
    """Timer that sets `is_migrating` after the grace time of a drained or leaving replica."""
    watch: asyncio.Task[None] | None = None
    last_failure: LastFailure | None = None
    """Last failure that the replica caused; None if it has caused no failure."""

    def cancel_migration(self) -> None:
        """Cancel a scheduled or running migration, so that streams remain on this replica."""
        self.is_migrating = False
        if self.migration_timer is not None:
            self.migration_timer.cancel()
            self.migration_timer = None

    def schedule_migration(self, grace_s: float) -> None:
        """Schedule the migration of streams to other replicas, to start in `grace_s` seconds.

        Do nothing if a migration is scheduled or in progress.
        """
        if self.migration_timer is None:
            loop = asyncio.get_running_loop()
            self.migration_timer = loop.call_later(grace_s, setattr, self, "is_migrating", True)

    @property
    def ready(self) -> bool:
        """True if the replica served the model when last polled, and is not leaving."""
        return self.engine.ready and not self.leaving

    @property
    def accepts_new(self) -> bool:
        """True if a new request may be sent to this replica."""
        return self.engine.ready and not self.leaving and self.drained_at is None

    def can_serve(self, generation: Generation) -> bool:
        """Return True if the replica can run the generation, including its LoRA adapter.

        If the replica reads adapters from its disk, the adapter must be there. Otherwise the
        weights are sent in the request, and their dtype and tp_size must fit the engine.
        """
        if generation.forms and self.variant not in generation.forms:
            return False
        lora = generation.params.lora
        if lora is None:
            return True
        capabilities = self.engine.capabilities
        if not capabilities.reads_adapters:
            return capabilities.takes_weights(lora.dtype, lora.tp_size)
        return lora.folders is not None and lora.folders.at(self.endpoint) is not None

    @property
    def state(self) -> str:
        """State for operators: "ready", or the reason why the replica gets no new requests."""
        if self.leaving:
            return "leaving"
        if not self.engine.ready:
            return self.engine.why_not_ready
        if self.drained_at is not None:
            return "draining" if self.in_flight else "drained"
        return "failing, left alone for a while" if self.breaker.is_open else "ready"


class ReplicaLease:
    """Context manager for one request that runs on a replica.

    Entering counts the request as in flight, and sets `replica` in the request's context. Entering
    also sets the lease's attribute `metadata`: the gRPC metadata for the call to Triton, with the
    trace context. Exiting reports to the replica's circuit breaker whether the replica worked.
    """

    def __init__(
        self,
        replica: Replica,
        request: RequestContext,
        on_release: Callable[[Replica], None],
        lane: Lane = None,
        prefixes: PromptPrefixes | None = None,
    ) -> None:
        """Prepare a lease.

        Args:
            replica: the replica that runs the request.
            request: the request's context.
            on_release: called with the replica on exit.
            lane: the lane of the request.
            prefixes: hashes of the prompt's prefixes, to update the estimate of the replica's
                prompt cache; None skips the update.
        """
        self.replica = replica
        self.reused_tokens: int | None = None
        """Number of cached prompt tokens that the engine has reported. Set by the caller."""
        self._prefixes = prefixes
        self._waiting = 0.0
        self._lane = lane
        self._request = request
        self._on_release = on_release
        self._probe = False
        self._answered = False
        self._began = time.monotonic()
        self._span: AttemptSpan | None = None
        self.metadata: Metadata = {}

    @property
    def engine(self) -> Engine:
        return self.replica.engine

    def __enter__(self) -> ReplicaLease:
        self._probe = self.replica.breaker.begin()
        self.replica.in_flight += 1
        self.replica.requests += 1
        if self._lane is not None:
            self.replica.lanes[self._lane] += 1
        if self._prefixes is not None:
            self._expected = self.replica.engine.prefixes.record_sent(self._prefixes)
            self._waiting = max(self._prefixes.tokens - self._expected.tokens, 0.0)
            self.replica.waiting_tokens += self._waiting
        self._request.replica = self.replica.endpoint
        self.metadata = self._request.parent
        if self._request.span is not None:
            self._span = self._request.span.begin_attempt(self.replica.endpoint)
            self.metadata = self._span.metadata
        return self

    @property
    def uses_reused_tokens(self) -> bool:
        """True if the caller should set `reused_tokens`, to update the cache estimate."""
        return self._prefixes is not None

    @property
    def has_answered(self) -> bool:
        """True if the engine has sent the first token."""
        return self._answered

    def record_first_token(self) -> None:
        """Record that the engine has sent a token. The circuit breaker then counts a success."""
        self._answered = True
        self._remove_waiting_tokens()
        # Report success now, because the end of the answer may come much later. Clear `_probe`,
        # because a probe ends at the first token. If `_probe` remained set, the end of this request
        # would be reported to the breaker as the outcome of a later probe.
        self._probe = False
        self.replica.breaker.record_success()
        if self._span is not None:
            self._span.mark_first_token()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.replica.in_flight -= 1
        if self._lane is not None:
            self.replica.lanes[self._lane] -= 1
            if not self.replica.lanes[self._lane]:
                del self.replica.lanes[self._lane]
        self._remove_waiting_tokens()
        cache = self.replica.engine.prefixes
        if error is not None and self._is_replica_failure(error):
            self.replica.breaker.record_failure(self._began, probe=self._probe)
            why = str(error) or type(error).__name__
            self.replica.last_failure = LastFailure(time.time(), why)
            if self.replica.breaker.is_open:
                cache.forget()
        else:
            self.replica.breaker.record_unknown(probe=self._probe)
            if self._answered and self._prefixes is not None:
                cache.record_answer(self._prefixes, self._expected, self.reused_tokens)
        if self._span is not None:
            self._span.end(error_type)
        self._on_release(self.replica)

    def _remove_waiting_tokens(self) -> None:
        """Subtract this prompt's uncached tokens from the replica's `waiting_tokens`."""
        self.replica.waiting_tokens -= self._waiting
        self._waiting = 0.0

    @staticmethod
    def _is_replica_failure(error: BaseException) -> bool:
        """Return True if the error shows that the replica is broken or unavailable.

        Any other EngineError concerns a single request, and any other TimeoutError comes from the
        request's own deadline. If such errors counted, requests of one tenant could open the
        circuit breaker for all tenants.
        """
        return isinstance(error, (EngineUnavailable, EngineBroken, EngineSilent))
