"""The watcher that polls like upstream: reported requests, and when it drops a request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from tests.support.patience import PATIENCE_S
from triton_repo.cpu_executor.llmapi.upstream_watch import UpstreamWatch


class _Answer:
    ended = False


class _Request:
    """A Triton request that signals each call of `is_cancelled`."""

    def __init__(self, *, left: bool = False) -> None:
        self._left = left
        self.asked = threading.Semaphore(0)

    def is_cancelled(self) -> bool:
        self.asked.release()
        return self._left

    def wait(self) -> None:
        assert self.asked.acquire(timeout=PATIENCE_S)


@pytest.fixture
def told() -> Queue[_Answer]:
    return Queue()


@pytest.fixture
def watch(told: Queue[_Answer]) -> Iterator[UpstreamWatch]:
    watch = UpstreamWatch(0.001, told.put)
    yield watch
    watch.stop()


def test_a_client_that_has_left_is_told(watch: UpstreamWatch, told: Queue[_Answer]) -> None:
    stays, leaves = _Answer(), _Answer()
    asked = _Request()
    watch.add(stays, asked)
    watch.add(leaves, _Request(left=True))
    assert told.get(timeout=PATIENCE_S) is leaves
    watch.remove(leaves)
    asked.wait()
    watch.stop()
    assert stays not in told.queue


def test_an_ended_one_is_asked_once_more_and_not_told(
    watch: UpstreamWatch, told: Queue[_Answer]
) -> None:
    ended, other = _Answer(), _Request()
    ended.ended = True
    request = _Request(left=True)
    watch.add(ended, request)
    watch.add(_Answer(), other)
    for _ in range(3):
        other.wait()
    watch.stop()
    assert request.asked.acquire(blocking=False)
    assert not request.asked.acquire(blocking=False)
    assert told.empty()


def test_a_removed_one_is_asked_no_more(watch: UpstreamWatch) -> None:
    answer, request, other = _Answer(), _Request(), _Request()
    watch.add(answer, request)
    request.wait()
    watch.remove(answer)
    while request.asked.acquire(blocking=False):
        pass
    watch.add(_Answer(), other)
    for _ in range(3):
        other.wait()
    assert not request.asked.acquire(blocking=False)
