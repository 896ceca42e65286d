"""One replica, and one request's place on it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from gateway.errors import EngineBroken, EngineSilent, EngineUnavailable
from gateway.generation import Generation
from gateway.observability.request_context import RequestContext
from gateway.scheduling.breaker import Breaker
from gateway.scheduling.discovery import DEFAULT_WEIGHT
from gateway.scheduling.kinds import Kind, Lane
from gateway.triton.engine import Engine
from gateway.triton.prefix_cache import PromptPrefixes
from gateway.triton.transport import Metadata

if TYPE_CHECKING:
    from gateway.observability.tracing import AttemptSpan


class LastFailure(NamedTuple):
    """What a replica failed with last. `at` is in seconds since 1970."""

    at: float
    why: str


@dataclass(eq=False, slots=True)
class Replica:
    """One endpoint. `leaving` ones finish what they have and get nothing new.

    Of those that can take a request it goes to ones with a `weight`, in proportion to that; to one
    of weight 0 where there is no other. A drained one gets nothing that came since.
    """

    endpoint: str
    engine: Engine
    breaker: Breaker = field(default_factory=Breaker)
    weight: float = DEFAULT_WEIGHT
    drained_at: float | None = None
    """In the event loop's time."""
    kind: Kind | None = None
    """None until it was seen serving."""
    in_flight: int = 0
    lanes: Counter[Lane] = field(default_factory=Counter)
    """Of those in flight, how many can go to some kinds of replicas alone, and to which."""
    requests: int = 0
    """That were sent there."""
    waiting_tokens: float = 0.0
    """Of prompts that are not answered yet: without what its cache likely has of them. Not counted
    while there is no other replica."""
    leaving: bool = False
    sends_away: bool = False
    """Streams that can go on elsewhere do so now."""
    grace: asyncio.TimerHandle | None = None
    """Until they do, of one that is drained or leaves."""
    watch: asyncio.Task[None] | None = None
    last_failure: LastFailure | None = None
    """Of a request's that it is to blame for."""

    def keep(self) -> None:
        """Its streams stay."""
        self.sends_away = False
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    def send_away(self, grace_s: float) -> None:
        """Its streams go on elsewhere, so many seconds from when this was first said."""
        if self.grace is None:
            loop = asyncio.get_running_loop()
            self.grace = loop.call_later(grace_s, setattr, self, "sends_away", True)

    @property
    def ready(self) -> bool:
        """Whether it serves the model, as far as was last seen."""
        return self.engine.ready and not self.leaving

    @property
    def takes_new(self) -> bool:
        """Whether a request that comes now may be sent there."""
        return self.engine.ready and not self.leaving and self.drained_at is None

    def takes(self, generation: Generation) -> bool:
        """Whether its kind can take it, and it has the adapter, or can be sent it."""
        if generation.forms and self.kind not in generation.forms:
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
        """Whether it is given requests, or why not, in words."""
        if self.leaving:
            return "leaving"
        if not self.engine.ready:
            return self.engine.why_not_ready
        if self.drained_at is not None:
            return "draining" if self.in_flight else "drained"
        return "failing, left alone for a while" if self.breaker.open else "ready"


class ReplicaLease:
    """One request's place on a replica, in a `with`; how the body ends is told to the breaker.

    Inside, `metadata` is what the call must carry: the trace that it belongs to. `request` is told
    of the replica.
    """

    def __init__(
        self,
        replica: Replica,
        request: RequestContext,
        released: Callable[[Replica], None],
        lane: Lane = None,
        prefixes: PromptPrefixes | None = None,
    ) -> None:
        """Without `prefixes` nothing is learned of the replica's cache."""
        self.replica = replica
        self.reused_tokens: int | None = None
        """What the engine had of the prompt, to be set once it has told."""
        self._prefixes = prefixes
        self._waiting = 0.0
        self._lane = lane
        self._request = request
        self._released = released
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
    def learns(self) -> bool:
        """Whether `reused_tokens` are of use to it."""
        return self._prefixes is not None

    @property
    def has_answered(self) -> bool:
        return self._answered

    def answered(self) -> None:
        """The engine has given a token: it works."""
        self._answered = True
        self._waits_no_more()
        # The breaker has its answer; by the end of this request it may have sent another probe.
        self._probe = False
        self.replica.breaker.succeeded()
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
        self._waits_no_more()
        cache = self.replica.engine.prefixes
        if error is not None and self._blames(error):
            self.replica.breaker.failed(self._began, probe=self._probe)
            why = str(error) or type(error).__name__
            self.replica.last_failure = LastFailure(time.time(), why)
            if self.replica.breaker.open:
                cache.forget()
        else:
            self.replica.breaker.undecided(probe=self._probe)
            if self._answered and self._prefixes is not None:
                cache.record_answer(self._prefixes, self._expected, self.reused_tokens)
        if self._span is not None:
            self._span.end(error_type)
        self._released(self.replica)

    def _waits_no_more(self) -> None:
        self.replica.waiting_tokens -= self._waiting
        self._waiting = 0.0

    @staticmethod
    def _blames(error: BaseException) -> bool:
        """Whether it is the replica that has failed.

        An EngineError is the answer to one request, and any other TimeoutError its own deadline's:
        its tenant could take the replica from all.
        """
        return isinstance(error, (EngineUnavailable, EngineBroken, EngineSilent))
