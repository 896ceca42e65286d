"""The memory tier: the adapters used last, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

from adapters.adapter import Converted


class Memory:
    """Least recently used goes first. What is larger than the limit is not kept at all.

    The bytes are this process' own, so that nothing that happens to a file changes them. Versions
    that are being sent are held besides, by whoever sends them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[str, Converted] = OrderedDict()
        self.nbytes = 0

    def get(self, digest: str) -> Converted | None:
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        return found

    def put(self, converted: Converted) -> None:
        self.drop(converted.digest)
        if converted.nbytes > self._limit:
            return
        self._kept[converted.digest] = converted
        self.nbytes += converted.nbytes
        while self.nbytes > self._limit:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes

    def drop(self, digest: str) -> None:
        old = self._kept.pop(digest, None)
        if old is not None:
            self.nbytes -= old.nbytes
