"""The order in which received messages go to their readers, over all connections of a process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

# A turn makes one more delivery for so many that wait: a flood of requests makes turns long, and
# tokens must not starve behind them.
_WAITING_PER_DELIVERY = 64


class Receiver(Protocol):
    """A call with messages that nobody has read."""

    @property
    def is_awaited(self) -> bool:
        """Return True if a task waits for the next message and is to be woken with it."""

    def deliver(self) -> None:
        """Hand the messages to the reader; do nothing if it has taken them."""


class DeliveryQueue:
    """Deliveries that are still to be made in one event loop, one in each of its turns.

    One read may bring tokens of some hundred streams, which take 15 to 20 us of CPU each. If one
    turn delivered all of them, each step of a new request would wait for milliseconds: its arrival,
    its first message and its answer. A turn more costs less than a microsecond.
    """

    def __init__(self) -> None:
        self._due: deque[Receiver | _Callback] = deque()

    def add(self, calls: Sequence[Receiver], waits: int) -> None:
        """Deliver the messages of a single call now, and those of several in turn.

        Of the `waits` tasks that wait for a message, those that have one here are woken now: each
        goes on in a turn of its own anyway.
        """
        due = self._due
        if len(calls) == 1 and not due:
            calls[0].deliver()
            return
        if waits:
            for call in calls:
                if call.is_awaited:
                    call.deliver()
        if not due:
            asyncio.get_running_loop().call_soon(self._run)
        due.extend(calls)

    def call_after(self, callback: Callable[[], object]) -> None:
        """Call `callback` in another turn, once everything added so far is delivered."""
        if self._due:
            self._due.append(_Callback(callback))
        else:
            asyncio.get_running_loop().call_soon(callback)

    def _run(self) -> None:
        due = self._due
        count = 1 + (len(due) - 1) // _WAITING_PER_DELIVERY
        if len(due) > count:
            asyncio.get_running_loop().call_soon(self._run)
        for _ in range(count):
            due.popleft().deliver()


class _Callback:
    """A function in the place of a delivery."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.deliver = callback


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, DeliveryQueue] = WeakKeyDictionary()


def delivery_queue() -> DeliveryQueue:
    """Return the running event loop's queue."""
    return _QUEUES.setdefault(asyncio.get_running_loop(), DeliveryQueue())
