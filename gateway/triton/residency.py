"""Which LoRA adapters one engine holds, and which request may bring in another.

TensorRT-LLM keeps adapters in a cache of its own: the first request of a `lora_task_id` carries
the weights, later ones the id alone; an idle adapter may be evicted at any time; and when every
cached adapter is in use, one more fails. So first loads of one id are serialised, an evicted
adapter is sent again, and after an overflow requests wait for another adapter to go idle.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from gateway.triton.events import ColdCause

# A request for an adapter that is in use needs no slot, so it goes ahead of requests that wait for
# one; after this time it no longer does, or those could wait for ever.
_PASS_FOR_S = 1.0
# After an overflow fewer adapters may be in flight at once. One very large adapter may have been
# the reason, so after this time twice as many are tried, if more are wanted. All that wait, tried
# at once, would bring their weights for nothing.
_LIMIT_FOR_S = 30.0


@dataclass(slots=True)
class _Turn:
    task_id: int
    handed_over: asyncio.Future[None]
    since: float = field(default_factory=time.monotonic)


class Residency:
    """The adapter cache of one replica as seen from here. Belongs to one event loop."""

    def __init__(self) -> None:
        self._resident: set[int] = set()
        self._causes: dict[int, ColdCause] = {}
        self._loading: dict[int, asyncio.Event] = {}
        self._active: Counter[int] = Counter()
        self._waiting: deque[_Turn] = deque()
        self.loads = 0
        """How often an adapter was brought in."""
        self.evictions: Counter[int] = Counter()
        """How often the engine said of an adapter that it holds it no more."""
        self._limit: int | None = None
        self._limit_until = 0.0

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
        """Task ids that are being brought."""
        return self._loading.keys()

    def has(self, task_id: int) -> bool:
        """Whether a request for it need not bring the weights, as far as is known; or another one
        brings them now."""
        return task_id in self._resident or task_id in self._loading

    async def take_slot(self, task_id: int) -> None:
        """A slot for a request, waiting in line if need be. Each needs one `give_back_slot`."""
        if not self._must_wait(task_id):
            self._active[task_id] += 1
            return
        turn = _Turn(task_id, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            await turn.handed_over
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._hand_over()
            else:  # handed over in the same moment
                self.give_back_slot(task_id)
            raise

    def give_back_slot(self, task_id: int) -> None:
        """Gives the slot back to whoever waits longest."""
        self._active[task_id] -= 1
        if not self._active[task_id]:
            del self._active[task_id]
        self._hand_over()

    def overflow(self) -> None:
        """The engine could not make room: fewer adapters at once from now on."""
        self._limit = max(1, len(self._active) - 1)
        self._limit_until = time.monotonic() + _LIMIT_FOR_S

    async def must_carry(self, task_id: int) -> bool:
        """Whether the request has to bring the weights.

        Waits while another request brings them. After True exactly one of `loaded` and
        `not_loaded` must follow.
        """
        while task_id not in self._resident:
            loading = self._loading.get(task_id)
            if loading is None:
                self._loading[task_id] = asyncio.Event()
                return True
            await loading.wait()
        return False

    def cause(self, task_id: int) -> ColdCause:
        """Why the weights of an adapter that is not resident have to be sent."""
        return self._causes.get(task_id, "first_use")

    def loaded(self, task_id: int) -> None:
        self._resident.add(task_id)
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

    def _must_wait(self, task_id: int) -> bool:
        self._relax()
        if self._limit is None:
            return False
        if task_id in self._active:
            return bool(self._waiting) and time.monotonic() - self._waiting[0].since > _PASS_FOR_S
        return bool(self._waiting) or not self._has_room()

    def _relax(self) -> None:
        if self._limit is not None and self._waiting and time.monotonic() >= self._limit_until:
            self._limit *= 2
            self._limit_until = time.monotonic() + _LIMIT_FOR_S

    def _has_room(self) -> bool:
        return self._limit is None or len(self._active) < self._limit

    def _hand_over(self) -> None:
        self._relax()
        for turn in list(self._waiting):
            able = turn.task_id in self._active or self._has_room()
            if not able and time.monotonic() - turn.since > _PASS_FOR_S:
                return  # nobody passes it any more
            if able:
                self._waiting.remove(turn)
                self._active[turn.task_id] += 1
                if not turn.handed_over.done():
                    turn.handed_over.set_result(None)
