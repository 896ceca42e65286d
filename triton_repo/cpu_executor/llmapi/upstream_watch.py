"""Watcher for disconnected clients that reproduces a crash of TensorRT-LLM's model.py, for tests.

Upstream polls requests for cancellation in one thread, and sends streamed responses in another
thread. A request may therefore be polled while its final response is sent, or afterwards. By then
Triton 2.51 has freed the polled object, and the model's process dies of signal 11. Requests without
streaming are not affected, because polling ends before their response is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class WatchedAnswer(Protocol):
    """Responses to one request. `ended` is True once the final response was sent."""

    @property
    def ended(self) -> bool: ...


class UpstreamWatch:
    """Thread that polls each request for cancellation every `period_s` seconds.

    A streamed request is polled once more after its final response. If a client has disconnected
    before the final response, the thread calls `on_left` with the `WatchedAnswer` of the request.
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
        """Start polling the Triton request `request`, whose responses `answer` represents."""
        with self._lock:
            self._requests[answer] = request

    def remove(self, answer: WatchedAnswer) -> None:
        """Stop polling a request. After this method has returned, the request is not polled."""
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
