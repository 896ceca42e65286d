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

# Maximum number of deliveries in one turn (iteration) of the event loop, and the same while a task
# waits for a message. With a single delivery per turn, the steps of new requests would wait for
# less. But then each token costs more: of the tokens written in one turn, all but the first find
# the code and the kernel's data in the CPU's caches.
_DELIVERIES_PER_TURN = 16
_DELIVERIES_BESIDE_WAITS = 4
# A queue that was never empty for this time is late. Its deliveries then get `_LATE_SHARE` times as
# much time as the rest of a turn takes, so new requests do not starve streams that began earlier.
_LATE_S = 0.02
_LATE_SHARE = 6.0
# Maximum time that the rest of a turn counts for, so that deliveries do not delay a turn for longer
# than `_LATE_SHARE` times this.
_MAX_REST_S = 0.0025
# While the gateway is overloaded, messages are held for this time, so that several messages of a
# stream are written at once. At 50 tokens/s that saves a third of the CPU time per token, and the
# loop serves more requests.
_HOLD_S = 0.04
# Maximum number of large reads while messages are held. A further one ends the hold, because
# undelivered messages fill the memory.
_READS_PER_HOLD = 8


class Receiver(Protocol):
    """A call with unread messages."""

    @property
    def is_awaited(self) -> bool:
        """Return True if a task waits for the next message, so the message should wake it."""

    def deliver(self) -> None:
        """Hand the messages to their reader. Do nothing if the reader has already taken them."""


class DeliveryQueue:
    """Queue of the deliveries that are still to be made in one event loop.

    Each turn (iteration) of the loop makes only a few deliveries. One read may have tokens of some
    hundred streams, which take 15 to 20 us of CPU each. If one turn delivered all of them, each
    step of a new request would wait for milliseconds: its arrival, its first message and its
    answer. While a task waits for a message, a turn makes even fewer deliveries.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waits = 0
        """Number of tasks that wait for a message, over all connections."""
        self._due: deque[Receiver | _Callback] = deque()
        self._clock = clock
        self._filled_at = self._ran_at = 0.0
        """`_filled_at` is the time since which the queue was never empty for long. `_ran_at` is the
        time of the last delivery."""
        self._is_overloaded: Callable[[], bool] = lambda: False
        self._hold: asyncio.TimerHandle | None = None
        self._hold_reads = 0

    def gather_while(self, is_overloaded: Callable[[], bool]) -> None:
        """Hold messages for `_HOLD_S` while `is_overloaded` returns True.

        So several messages of a stream are delivered together.
        """
        self._is_overloaded = is_overloaded

    def add(self, calls: Sequence[Receiver]) -> None:
        """Deliver the messages of `calls`: now if they are few, otherwise in later turns.

        Later deliveries are made in the order in which they were added. Tasks that wait for one of
        the messages are woken now in any case: each task resumes in a turn of its own anyway.
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
            # A short time without deliveries does not count as empty: a connection whose read was
            # delayed fills the queue again at once.
            if now - self._ran_at > _LATE_S:
                self._filled_at = self._ran_at = now
            loop = asyncio.get_running_loop()
            if holds:
                self._hold, self._hold_reads = loop.call_later(_HOLD_S, self._run), 0
            else:
                loop.call_soon(self._run)
        due.extend(calls)

    def call_after(self, callback: Callable[[], object]) -> None:
        """Call `callback` in a later turn, after all deliveries that were added before.

        While messages are held because of an overload, `callback` does not wait for them, up to
        `_READS_PER_HOLD` times. Then the hold is ended.
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
        """Return True if messages have for some time arrived faster than they were delivered."""
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
    """An entry of the queue that calls a function instead of delivering messages."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.deliver = callback


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, DeliveryQueue] = WeakKeyDictionary()


def delivery_queue() -> DeliveryQueue:
    """Return the queue of the running event loop, which all its connections share."""
    return _QUEUES.setdefault(asyncio.get_running_loop(), DeliveryQueue())
