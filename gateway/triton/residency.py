"""Which LoRA adapters one engine holds, and which request may bring in another.

TensorRT-LLM keeps adapters in a cache of its own: the first request of a `lora_task_id` carries
the weights, later ones the id alone; an idle adapter may be evicted at any time; and when every
cached adapter is in use, one more fails. So first loads of one id are serialised, an evicted
adapter is sent again, and after an overflow requests wait for another adapter to go idle. What goes
idle then is for the tenant that has the fewest in use.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field

from gateway.triton.events import ColdCause

# A request for an adapter that is in use needs no room, so it goes ahead of requests that wait for
# some. After this time it no longer goes ahead of those of its own tenant, or of one that has fewer
# adapters in use, or they could wait for ever.
_PASS_FOR_S = 1.0
# After an overflow fewer adapters may be in flight at once. One very large adapter may have been
# the reason, so after this time twice as many are tried, if more are wanted. All that wait, tried
# at once, would bring their weights for nothing.
_LIMIT_FOR_S = 30.0
# What found no room although nothing else was in use is not sent again for so long. By then the
# cache may be another, or less of it in use by other gateways.
_REFUSED_FOR_S = 300.0


@dataclass(slots=True, eq=False)
class _Turn:
    task_id: int
    tenant: str
    since: float
    handed_over: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _InLine:
    """A request that is in line for its turn to bring an adapter."""

    until_brought: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Ends its waiting when another one begins to bring it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)


class Residency:
    """The adapter cache of one replica as seen from here. Belongs to one event loop."""

    def __init__(self) -> None:
        self._resident: set[int] = set()
        self._causes: dict[int, ColdCause] = {}
        self._loading: dict[int, asyncio.Event] = {}
        self._in_line: dict[int, dict[str, _InLine]] = {}
        """By task id and tenant."""
        self._active: Counter[int] = Counter()
        self._active_of: dict[str, Counter[int]] = {}
        self._waiting: deque[_Turn] = deque()
        self.loads = 0
        """How often an adapter was brought in."""
        self.evictions: Counter[int] = Counter()
        """How often the engine said of an adapter that it holds it no more."""
        self._limit: int | None = None
        self._limit_until = 0.0
        self._lowered: dict[int, int | None] = {}
        """By the task ids that the limit was lowered for: what it was before."""
        self._largest = 0
        """Bytes of the largest adapter that the engine has taken."""
        self._refused: dict[int, float] = {}
        """Until when a task id is refused."""

    @property
    def active(self) -> frozenset[int]:
        """Task ids with a request in flight."""
        return frozenset(self._active)

    @property
    def waiting(self) -> frozenset[int]:
        """Task ids whose requests wait for another adapter to go idle."""
        return frozenset(turn.task_id for turn in self._waiting)

    @property
    def resident(self) -> Collection[int]:
        """Task ids that the engine holds, as far as is known."""
        return self._resident

    @property
    def loading(self) -> Collection[int]:
        """Task ids that are being brought, or in line for it."""
        return self._loading.keys() | self._in_line.keys()

    def has(self, task_id: int) -> bool:
        """Whether a request for it need not bring the weights, as far as is known; or another one
        brings them now, or is in line for it."""
        return task_id in self._resident or task_id in self._loading or task_id in self._in_line

    async def take_slot(self, task_id: int, tenant: str = "") -> None:
        """A slot for a request, waiting in line if need be. Each needs one `give_back_slot`."""
        if self._limit is None:
            self._take(task_id, tenant)
            return
        handed_over = asyncio.get_running_loop().create_future()
        turn = _Turn(task_id, tenant, time.monotonic(), handed_over)
        self._waiting.append(turn)
        self._hand_over()
        try:
            await turn.handed_over
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._hand_over()
            else:  # handed over in the same moment
                self.give_back_slot(task_id, tenant)
            raise

    def give_back_slot(self, task_id: int, tenant: str = "") -> None:
        """Gives the slot back to whoever is next."""
        for active in (self._active, self._active_of[tenant]):
            active[task_id] -= 1
            if not active[task_id]:
                del active[task_id]
        if not self._active_of[tenant]:
            del self._active_of[tenant]
        self._hand_over()

    def overflow(self, task_id: int, nbytes: int, before: int = 0) -> None:
        """The engine could not make room for an adapter of so many bytes, as `before` for the same
        request: fewer adapters at once from now on, where there are others."""
        if len(self._active) == 1:
            return
        self._lowered.setdefault(task_id, self._limit)
        # What may need the whole cache gets there in ever larger steps, not in a hundred.
        fewer = 2**before if nbytes > self._largest else 1
        self._limit = max(1, len(self._active) - fewer)
        self._limit_until = time.monotonic() + _LIMIT_FOR_S

    def may_be_too_large(self, nbytes: int) -> bool:
        """Whether an adapter that has a slot and found no room may need more than the whole cache:
        no other one is in use, as far as is known here, and none so large was ever taken."""
        return len(self._active) == 1 and nbytes > self._largest

    def refuse(self, task_id: int) -> None:
        """It is larger than the whole cache: not to be sent for some minutes. What others have lost
        for its sake they have again."""
        self._refused[task_id] = time.monotonic() + _REFUSED_FOR_S
        if task_id in self._lowered:
            before = self._lowered.pop(task_id)
            if self._limit is not None:
                self._limit = None if before is None else max(before, self._limit)
            self._hand_over()

    def refuses(self, task_id: int, nbytes: int) -> bool:
        """Whether it is not to be sent. Where one as large was taken since, there was no room for
        another reason."""
        until = self._refused.get(task_id, 0.0)
        return time.monotonic() < until and nbytes > self._largest

    async def must_carry(
        self,
        task_id: int,
        tenant: str = "",
        turn: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> AsyncExitStack | None:
        """The turn of a request that has to bring the weights, to be left when they are sent; None
        where it need not bring them.

        Waits while another one brings them. Whichever has its turn first does, and of each tenant
        one is in line for it: nobody waits for a tenant that brings much else. After a turn exactly
        one of `loaded` and `not_loaded` must follow.
        """
        while task_id not in self._resident:
            in_line = self._in_line.get(task_id, {})
            if task_id in self._loading:
                await self._loading[task_id].wait()
            elif tenant in in_line:
                await in_line[tenant].left.wait()
            else:
                taken = AsyncExitStack()
                if not await self._comes_first(task_id, tenant, taken.enter_async_context(turn())):
                    continue
                if task_id not in self._resident and task_id not in self._loading:
                    self._loading[task_id] = asyncio.Event()
                    for other in self._in_line.pop(task_id, {}).values():
                        other.until_brought.reschedule(0)
                    return taken
                await taken.aclose()  # another one had its turn in the same moment
        return None

    async def _comes_first(self, task_id: int, tenant: str, turn: Awaitable[object]) -> bool:
        """Whether the turn came before another request began to bring the weights."""
        place = _InLine()
        self._in_line.setdefault(task_id, {})[tenant] = place
        try:
            async with place.until_brought:
                await turn
        except TimeoutError:
            if not place.until_brought.expired():
                raise
            return False
        finally:
            place.left.set()
            in_line = self._in_line.get(task_id, {})
            if in_line.get(tenant) is place:
                del in_line[tenant]
                if not in_line:
                    del self._in_line[task_id]
        return True

    def cause(self, task_id: int) -> ColdCause:
        """Why the weights of an adapter that is not resident have to be sent."""
        return self._causes.get(task_id, "first_use")

    def loaded(self, task_id: int, nbytes: int = 0) -> None:
        self._resident.add(task_id)
        self._largest = max(self._largest, nbytes)
        self._lowered.pop(task_id, None)
        self.loads += 1
        self._loading.pop(task_id).set()

    def not_loaded(self, task_id: int) -> None:
        """The request that brought the weights failed or was given up; the next one brings them."""
        self._loading.pop(task_id).set()

    def evicted(self, task_id: int) -> None:
        self._resident.discard(task_id)
        self.evictions[task_id] += 1
        self._causes[task_id] = "evicted"

    def restarted(self) -> None:
        """The engine process is a new one and holds nothing."""
        self._causes.update(dict.fromkeys(self._resident, "restarted"))
        self._resident.clear()
        self._largest = 0
        self._lowered.clear()
        self._refused.clear()

    def _take(self, task_id: int, tenant: str) -> None:
        self._active[task_id] += 1
        self._active_of.setdefault(tenant, Counter())[task_id] += 1

    def _in_use_by(self, tenant: str) -> int:
        """Adapters, however many requests each of them has."""
        return len(self._active_of.get(tenant, ()))

    def _has_room(self) -> bool:
        return self._limit is None or len(self._active) < self._limit

    def _relax(self) -> None:
        if self._limit is not None and time.monotonic() >= self._limit_until:
            self._limit *= 2
            self._limit_until = time.monotonic() + _LIMIT_FOR_S

    def _hand_over(self) -> None:
        """Room goes to the tenant with the fewest adapters in use, among equals to who waits
        longest."""
        self._let_pass()
        while self._waiting:
            self._relax()
            if not self._has_room():
                return
            self._start(min(self._waiting, key=lambda turn: self._in_use_by(turn.tenant)))
            self._let_pass()

    def _let_pass(self) -> None:
        """Hands over to those that need no room, but for whom nobody may pass any more."""
        now = time.monotonic()
        passed_long: set[str] = set()
        for turn in list(self._waiting):
            if turn.task_id not in self._active:
                if not self._has_room() and now - turn.since > _PASS_FOR_S:
                    passed_long.add(turn.tenant)
            elif turn.tenant not in passed_long and not any(
                self._in_use_by(turn.tenant) > self._in_use_by(other) for other in passed_long
            ):
                self._start(turn)

    def _start(self, turn: _Turn) -> None:
        self._waiting.remove(turn)
        self._take(turn.task_id, turn.tenant)
        if not turn.handed_over.done():
            turn.handed_over.set_result(None)
