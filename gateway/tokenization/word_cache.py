"""A bounded cache of token ids by text, which a flood of new texts does not empty.

See decision 043 in docs/decisions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

Ids = bytes
"""Token ids as the bytes of an `array("i")`."""

# An entry takes 400 bytes at most: longer texts, and texts of more ids, are not cached.
_MAX_CHARS = 64
_MAX_BYTES = 16 * array("i").itemsize


class WordCache:
    """Two generations of entries. When the newer one is full, it becomes the older one.

    An entry that is used is moved to the newer one. So common texts remain cached, however many
    others are added, and no entry needs the time of its last use.
    """

    def __init__(self, max_entries: int) -> None:
        """Create a cache. `max_entries` counts both generations."""
        self._max_generation_entries = max_entries // 2
        self.newer: dict[str, Ids] = {}
        """Entries for callers that look up many texts at once; other entries are found by
        `find`."""
        self._older: dict[str, Ids] = {}

    def __len__(self) -> int:
        return len(self.newer) + len(self._older)

    def find(self, texts: Iterable[str]) -> tuple[dict[str, Ids], list[str]]:
        """Return the ids of the cached texts, and the other texts, each once."""
        known: dict[str, Ids] = {}
        new: list[str] = []
        for text in dict.fromkeys(texts):
            ids = self.newer.get(text)
            if ids is None and (ids := self._older.pop(text, None)) is not None:
                self._put(text, ids)
            if ids is None:
                new.append(text)
            else:
                known[text] = ids
        return known, new

    def add(self, entries: Mapping[str, Ids]) -> None:
        """Cache those entries that are small."""
        for text, ids in entries.items():
            if len(text) <= _MAX_CHARS and len(ids) <= _MAX_BYTES:
                self._put(text, ids)

    def _put(self, text: str, ids: Ids) -> None:
        if len(self.newer) >= self._max_generation_entries:
            self.newer, self._older = {}, self.newer
        self.newer[text] = ids
