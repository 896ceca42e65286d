"""The order in which received messages go to their readers, over all connections of a process.

See decision 055 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

# One in each turn would give a new request's steps less to wait for, but costs more than the turns:
# of tokens that are written in one turn, the later ones find code and kernel in the caches.
_DELIVERIES_PER_TURN = 16
_DELIVERIES_BESIDE_WAITS = 4
# A queue that has not been empty for so long is late. From then on deliveries get so many times the
# time that a turn takes besides: new requests must not starve the streams that began before them.
_LATE_S = 0.02
_LATE_SHARE = 6.0
# What a turn counts for in that, at most: deliveries must not hold up a turn for much longer.
_MAX_REST_S = 0.0025
# While requests are refused, messages wait for so long, so that several of a stream are written at
# once: at 50 tokens/s that is a third of a token's CPU. The loop then serves more requests.
_HOLD_S = 0.04
# Large reads in that time. Further ones end it, as undelivered messages fill the memory.
_READS_PER_HOLD = 8


class Receiver(Protocol):
    """A call with messages that nobody has read."""

    @property
    def is_awaited(self) -> bool:
        """Return True if a task waits for the next message and is to be woken with it."""

    def deliver(self) -> None:
        """Hand the messages to the reader; do nothing if it has taken them."""


class DeliveryQueue:
    """Deliveries that are still to be made in one event loop, a few in each of its turns.

    One read may bring tokens of some hundred streams, which take 15 to 20 us of CPU each. If one
    turn delivered all of them, each step of a new request would wait for milliseconds: its arrival,
    its first message and its answer. While a task waits for a message, turns deliver still fewer.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waits = 0
        """Tasks that wait for a message, on whichever connection."""
        self._due: deque[Receiver | _Callback] = deque()
        self._clock = clock
        self._filled_at = self._ran_at = 0.0
        """When the queue was empty for long last, and when the last turn's deliveries ended."""
        self._is_overloaded: Callable[[], bool] = lambda: False
        self._hold: asyncio.TimerHandle | None = None
        self._hold_reads = 0

    def gather_while(self, is_overloaded: Callable[[], bool]) -> None:
        """Deliver several messages of a stream together while `is_overloaded` returns True."""
        self._is_overloaded = is_overloaded

    def add(self, calls: Sequence[Receiver]) -> None:
        """Deliver the messages of `calls`: now if one turn may, else after those before.

        Tasks that wait for one of the messages are woken now. Each resumes in another turn anyway.
        """
        due = self._due
        holds = not due and self._is_overloaded()
        if not due and not holds and (len(calls) == 1 or len(calls) <= self._per_turn):
            for call in calls:
                call.deliver()
            return
        if self.waits:
            for call in calls:
                if call.is_awaited:
                    call.deliver()
        if not due:
            now = self._clock()
            # A connection whose read was put off fills the queue again at once.
            if now - self._ran_at > _LATE_S:
                self._filled_at = self._ran_at = now
            loop = asyncio.get_running_loop()
            if holds:
                self._hold, self._hold_reads = loop.call_later(_HOLD_S, self._run), 0
            else:
                loop.call_soon(self._run)
        due.extend(calls)

    def call_after(self, callback: Callable[[], object]) -> None:
        """Call `callback` in another turn, once everything added so far is delivered.

        Messages that are held for others of their stream do not count, while they are few.
        """
        loop = asyncio.get_running_loop()
        if self._hold is not None:
            self._hold_reads += 1
            if self._hold_reads <= _READS_PER_HOLD:
                loop.call_soon(callback)
                return
            self._hold.cancel()
            loop.call_soon(self._run)
        if self._due:
            self._due.append(_Callback(callback))
        else:
            loop.call_soon(callback)

    @property
    def is_late(self) -> bool:
        """Return True if messages have come faster than they are delivered for some time."""
        return self._ran_at - self._filled_at > _LATE_S > self._clock() - self._ran_at

    @property
    def _per_turn(self) -> int:
        return _DELIVERIES_BESIDE_WAITS if self.waits else _DELIVERIES_PER_TURN

    def _run(self) -> None:
        due, began = self._due, self._clock()
        if self._hold is not None:
            # Messages that were held on purpose are not late.
            self._hold, self._filled_at, self._ran_at = None, began, began
        try:
            for _ in range(min(len(due), self._per_turn)):
                due.popleft().deliver()
            if due and began - self._filled_at > _LATE_S:
                end = began + _LATE_SHARE * min(began - self._ran_at, _MAX_REST_S)
                while due and self._clock() < end:
                    due.popleft().deliver()
        finally:
            self._ran_at = self._clock()
            if due:
                asyncio.get_running_loop().call_soon(self._run)


class _Callback:
    """A function in the place of a delivery."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.deliver = callback


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, DeliveryQueue] = WeakKeyDictionary()


def delivery_queue() -> DeliveryQueue:
    """Return the running event loop's queue."""
    return _QUEUES.setdefault(asyncio.get_running_loop(), DeliveryQueue())
