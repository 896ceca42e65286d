"""Watch for disconnected clients like TensorRT-LLM's model.py, to reproduce its crash in tests.

Upstream's watcher is a thread, and another thread sends streamed answers. So requests are polled
for cancellation while their final response is being sent, and afterwards. By then Triton 2.51 has
freed the polled object, and dies of signal 11. A non-streaming answer is removed from the watcher
before it is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class WatchedAnswer(Protocol):
    """A request that is being answered; `ended` is True once its final response was sent."""

    @property
    def ended(self) -> bool: ...


class UpstreamWatch:
    """Poller of each request every `period_s` seconds, and of streamed ones once after their end.

    `on_left` is called in the watcher's thread for a request whose client has disconnected.
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
        """Watch a request of Triton's."""
        with self._lock:
            self._requests[answer] = request

    def remove(self, answer: WatchedAnswer) -> None:
        """Return once the request is no longer polled and will not be again."""
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
