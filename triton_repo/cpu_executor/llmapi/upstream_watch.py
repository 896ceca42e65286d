"""Watcher for disconnected clients that reproduces a crash of TensorRT-LLM's model.py, for tests.

Upstream polls requests for cancellation in one thread and sends streamed answers in another thread.
A request may therefore be polled while its final response is sent, or afterwards. By then Triton
2.51 has freed the polled object, and the process dies of signal 11. Non-streaming answers are not
affected: the watcher stops polling them before they are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class WatchedAnswer(Protocol):
    """A request that is being answered. `ended` is True once the final response was sent."""

    @property
    def ended(self) -> bool: ...


class UpstreamWatch:
    """Thread that polls each request for cancellation every `period_s` seconds.

    A streamed request is polled once more after its end. If a client has disconnected, the thread
    calls `on_left` with the client's answer.
    """

    def __init__(self, period_s: float, on_left: Callable[[Any], object]) -> None:
        self._period_s = period_s
        self._on_left = on_left
        self._lock = threading.Lock()
        self._requests: dict[WatchedAnswer, Any] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="upstream-watch")
        self._thread.start()

    def add(self, answer: WatchedAnswer, request: Any) -> None:
        """Start polling `request`, the Triton request that `answer` belongs to."""
        with self._lock:
            self._requests[answer] = request

    def remove(self, answer: WatchedAnswer) -> None:
        """Stop polling a request. No poll of this request happens after the return."""
        with self._lock:
            self._requests.pop(answer, None)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(self._period_s):
            with self._lock:
                for answer, request in list(self._requests.items()):
                    ended = answer.ended
                    left = request.is_cancelled()
                    if ended:
                        del self._requests[answer]
                    elif left:
                        self._on_left(answer)
