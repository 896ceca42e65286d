"""Bounded cache of token ids by text, in which common texts survive a flood of new ones.

See decision 043 in docs/decisions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

Ids = bytes
"""Token ids as the bytes of an `array("i")`."""

# Limits of an entry, which then takes 400 bytes at most. Longer texts, and texts with more ids, are
# not cached.
_MAX_CHARS = 64
_MAX_BYTES = 16 * array("i").itemsize


class WordCache:
    """Cache of two generations of entries. A full newer generation replaces the older one.

    An entry that is used moves to the newer generation. So common texts remain cached, however many
    others are added, and no entry needs the time of its last use.
    """

    def __init__(self, max_entries: int) -> None:
        """Create a cache. `max_entries` counts both generations."""
        self._max_generation_entries = max_entries // 2
        self.newer: dict[str, Ids] = {}
        """The newer generation. Callers may look up many texts here at once; `find` also searches
        the older generation."""
        self._older: dict[str, Ids] = {}

    def __len__(self) -> int:
        return len(self.newer) + len(self._older)

    def find(self, texts: Iterable[str]) -> tuple[dict[str, Ids], list[str]]:
        """Return the ids of the texts that are cached, and the other texts without duplicates."""
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
        """Cache the entries that do not exceed the limits of an entry."""
        for text, ids in entries.items():
            if len(text) <= _MAX_CHARS and len(ids) <= _MAX_BYTES:
                self._put(text, ids)

    def _put(self, text: str, ids: Ids) -> None:
        if len(self.newer) >= self._max_generation_entries:
            self.newer, self._older = {}, self.newer
        self.newer[text] = ids
