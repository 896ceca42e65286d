"""Scheduling of the tokens that the benchmark's scripted upstreams send.

A token is sent periodically, as fast as the receiver reads, or upon a signal. The request's
parameter `seed` selects this pace: a gateway passes the seed on to the upstream unchanged.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

BURST = 1
"""Seed of an answer whose tokens are sent as fast as the receiver reads them.

Seed 0, or no seed, has the same effect. Any other number, except the constants below, is the time
in milliseconds between two tokens.
"""

IDLE = 1_000_000
"""Seed for an answer that stops after its first token."""

SILENT = 2_000_000
"""Seed for an answer that never sends a token."""

STEPPED = 3_000_000
"""Seed of an answer with one immediate token, then one for each SIGUSR1 that the upstream gets.

If the client sends the signal only after it has received a token, even a slow gateway under test
never receives two tokens together. A periodic pace cannot guarantee this.
"""

_GOLDEN = 0.6180339887
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE = 1


class PacedSource(Protocol):
    """A stream of tokens. A `Pacer` decides when the next token is sent."""

    def takes(self) -> bool:
        """Return True if the receiver's flow control allows sending a token now."""

    def emit(self) -> bool:
        """Send the next token, which is due now.

        Returns False if no token is left, or if the receiver has disconnected.
        """


class Pacer:
    """Scheduler that calls `PacedSource.emit` when a token is due.

    The send times of periodic streams are spread evenly over the interval. Each token is then a
    separate write, which is the worst case for the receiver. The class uses the kernel's timerfd,
    because the event loop's timers have a resolution of a millisecond, and tokens of several
    streams would be sent in the same millisecond. Create the object inside the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._timer, self._beat)
        self._due: list[tuple[int, int, PacedSource, int]] = []
        self._order = count()
        self._bursting: list[PacedSource] = []
        self._stepping = False
        self._stepped: list[PacedSource] = []

    def add(self, source: PacedSource, seed: int) -> None:
        """Start sending the tokens of `source` at the pace that `seed` selects."""
        if seed == SILENT:
            return
        if seed <= BURST:
            self._bursting.append(source)
            self.wake()
        elif not source.emit():
            return
        elif seed == STEPPED:
            self._loop.add_signal_handler(signal.SIGUSR1, self._on_signal)
            self._stepped.append(source)
        elif seed != IDLE:
            interval = seed * 1_000_000
            number = next(self._order)
            phase = int(interval * (number * _GOLDEN % 1))
            heappush(self._due, (time.monotonic_ns() + phase, number, source, interval))
            self._arm()

    def wake(self) -> None:
        """Continue to send the tokens of sources with the pace `BURST`.

        Call this method when `takes` of a source may have changed from False to True.
        """
        if self._bursting and not self._stepping:
            self._stepping = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        """Send one token on each stream with the pace `BURST`, and schedule the next step.

        This imitates an engine, which generates one token for each request of its batch per step.
        """
        streams, self._bursting = self._bursting, []
        sent = False
        for source in streams:
            if not source.takes():
                self._bursting.append(source)
                continue
            sent = True
            if source.emit():
                self._bursting.append(source)
        self._stepping = False
        if sent:
            self.wake()

    def _on_signal(self) -> None:
        self._stepped = [source for source in self._stepped if source.emit()]

    def _beat(self) -> None:
        os.read(self._timer, 8)
        now = time.monotonic_ns()
        while self._due and self._due[0][0] <= now:
            due, _, source, interval = heappop(self._due)
            if source.emit():
                heappush(self._due, (due + interval, next(self._order), source, interval))
        self._arm()

    def _arm(self) -> None:
        if not self._due:
            return
        seconds, nanoseconds = divmod(self._due[0][0], 1_000_000_000)
        timespec = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)
        self._libc.timerfd_settime(self._timer, _ABSOLUTE, timespec, None)
