"""Delivery of received messages to their readers, spread over iterations of the event loop.

See decision 055 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

# Maximum number of deliveries in one turn (iteration) of the event loop. The second number applies
# while a task waits in `RpcCall.read`, as new requests do. With lower numbers, new requests would
# wait less, but each token would take more CPU time. The first token of a turn is the most
# expensive one, because it loads the code and the kernel's data into the CPU's caches.
_DELIVERIES_PER_TURN = 16
_DELIVERIES_BESIDE_WAITS = 4
# Seconds for which a message may wait before the queue counts as late. If the queue is late, each
# turn spends `_LATE_SHARE` times as much time on deliveries as on all other work. Otherwise, the
# work for new requests could delay the tokens of running streams more and more.
_LATE_S = 0.02
_LATE_SHARE = 6.0
# Maximum in seconds of the time for all other work, before it is multiplied by `_LATE_SHARE`. The
# deliveries of a turn in a late queue therefore take at most 15 ms.
_MAX_REST_S = 0.0025
# Seconds for which messages are held back while the gateway is overloaded. Several messages of a
# stream are then sent to the client at once. At 50 tokens/s per stream, this saves a third of the
# CPU time per token.
_HOLD_S = 0.04
# Maximum number of large reads (see `BaseConnection`) in one hold, the time in which messages are
# held back. The next large read ends the hold. Otherwise, held messages would fill the memory.
_READS_PER_HOLD = 8


class Receiver(Protocol):
    """A call with unread messages."""

    @property
    def is_awaited(self) -> bool:
        """True if a task waits for the next message."""

    def deliver(self) -> None:
        """Hand the messages to the reader. Do nothing if the reader has already taken them."""


class DeliveryQueue:
    """Queue of deliveries in one event loop. A delivery hands messages to their reader.

    One read from a socket may return tokens of several hundred streams. Delivering a token takes 15
    to 20 us of CPU time. If one turn (iteration) of the event loop delivered all these tokens,
    every step of a new request would wait for milliseconds. So each turn makes only a few
    deliveries, and even fewer while a task waits for a message.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.waits = 0
        """Number of tasks that wait for a message, on all connections together."""
        self._due: deque[tuple[float, Receiver | _Callback]] = deque()
        """Queue of (time, delivery). The delivery's messages have waited since this time."""
        self.now = clock
        """Clock in seconds. `since` of `add` is a time of this clock."""
        self._ran_at = self._released = 0.0
        """`_ran_at`: end of the last turn with deliveries. `_released`: end of the last hold."""
        self._age_s = 0.0
        """Seconds that the oldest message had waited when the last deliveries began."""
        self._is_overloaded: Callable[[], bool] | None = None
        self._hold: asyncio.TimerHandle | None = None
        self._hold_reads = 0

    def gather_while(self, is_overloaded: Callable[[], bool]) -> None:
        """Hold messages back for `_HOLD_S` seconds at a time until `is_overloaded` returns False.

        Several messages of a stream are then delivered together. Call this method again at the next
        overload: without overload, tokens do not call `is_overloaded`, which would take 4 % of the
        instructions for a token.
        """
        self._is_overloaded = is_overloaded

    def add(self, calls: Sequence[Receiver], since: float | None = None) -> None:
        """Deliver the messages of `calls` now if there are few calls, otherwise in later turns.

        `since` is the earliest time at which the messages may have arrived in the socket, in
        seconds of the queue's clock (see `now`). The default is the current time.

        Deliveries in later turns are made in the order in which they were added. If a task waits in
        the `read` of a call, this call's messages are delivered now in any case. This is cheap,
        because it only wakes the task.
        """
        due = self._due
        if not due and len(calls) == 1 and self._is_overloaded is None:
            calls[0].deliver()
            return
        holds = not due and self._must_hold()
        if not due and not holds and len(calls) <= self._per_turn:
            for call in calls:
                call.deliver()
            return
        if self.waits:
            for call in calls:
                if call.is_awaited:
                    call.deliver()
        if not due:
            loop = asyncio.get_running_loop()
            if holds:
                self._hold, self._hold_reads = loop.call_later(_HOLD_S, self._run), 0
            else:
                loop.call_soon(self._run)
        read_at = self.now() if since is None else since
        due.extend([(read_at, call) for call in calls])

    def _must_hold(self) -> bool:
        if self._is_overloaded is None:
            return False
        if not self._is_overloaded():
            self._is_overloaded = None
            return False
        return True

    def call_after(self, callback: Callable[[], object]) -> None:
        """Call `callback` in a later loop iteration, after all deliveries that were added before.

        While messages are held back because of an overload, call `callback` in the next turn,
        without waiting for these messages. If this method is called more than `_READS_PER_HOLD`
        times during one hold, end the hold.
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
            self._due.append((self.now(), _Callback(callback)))
        else:
            loop.call_soon(callback)

    @property
    def is_late(self) -> bool:
        """True if the last delivery was late and was made less than `_LATE_S` seconds ago.

        A delivery is late if its oldest message has waited for more than `_LATE_S` seconds.
        """
        return self._age_s > _LATE_S > self.now() - self._ran_at

    @property
    def _per_turn(self) -> int:
        return _DELIVERIES_BESIDE_WAITS if self.waits else _DELIVERIES_PER_TURN

    def _run(self) -> None:
        due, began = self._due, self.now()
        if self._hold is not None:
            # Messages that were held on purpose are not late.
            self._hold, self._released = None, began
        self._age_s = began - max(due[0][0], self._released) if due else 0.0
        try:
            for _ in range(min(len(due), self._per_turn)):
                due.popleft()[1].deliver()
            if self._age_s > _LATE_S:
                end = began + _LATE_SHARE * min(began - self._ran_at, _MAX_REST_S)
                while due and self.now() < end:
                    due.popleft()[1].deliver()
        finally:
            self._ran_at = self.now()
            if due:
                asyncio.get_running_loop().call_soon(self._run)


class _Callback:
    """Queue entry that calls a function instead of delivering messages."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.deliver = callback


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, DeliveryQueue] = WeakKeyDictionary()


def delivery_queue() -> DeliveryQueue:
    """Return the delivery queue of the running event loop. All connections of the loop share it."""
    return _QUEUES.setdefault(asyncio.get_running_loop(), DeliveryQueue())
