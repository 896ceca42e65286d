"""Cache of recently used adapter versions in memory, with a limit in bytes.

See decision 060 in docs/decisions.
"""

from __future__ import annotations

from collections import OrderedDict

from adapters.adapter import Converted


class MemoryTier:
    """Cache of adapter versions, which drops the least recently used version when it is full.

    A version that is larger than the limit is not stored. The cached bytes are not mapped files, so
    changes of files do not affect them. If a version is dropped while a request uploads it to an
    engine, its memory is freed only after the upload. Until then, the process may exceed the limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._versions: OrderedDict[str, Converted] = OrderedDict()
        self.nbytes = 0

    def get(self, digest: str) -> Converted | None:
        found = self._versions.get(digest)
        if found is not None:
            self._versions.move_to_end(digest)
        return found

    def put(self, converted: Converted) -> None:
        self.drop(converted.digest)
        if converted.nbytes > self._limit:
            return
        self._versions[converted.digest] = converted
        self.nbytes += converted.nbytes
        while self.nbytes > self._limit:
            self.nbytes -= self._versions.popitem(last=False)[1].nbytes

    def drop(self, digest: str) -> None:
        old = self._versions.pop(digest, None)
        if old is not None:
            self.nbytes -= old.nbytes
