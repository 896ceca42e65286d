"""Bounded cache of token ids by text. Common texts remain cached even if many new texts are added.

See decision 043 in docs/decisions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

Ids = bytes
"""Token ids (int32), stored as the bytes of an `array("i")`."""

# Maximum length of a cached text and of its ids. An entry then takes at most 400 bytes.
_MAX_CHARS = 64
_MAX_BYTES = 16 * array("i").itemsize


class WordCache:
    """Cache of two generations of entries. A full newer generation replaces the older one.

    An entry of the older generation moves to the newer generation when it is used. Common texts
    therefore remain cached, and no entry needs to store the time of its last use.
    """

    def __init__(self, max_entries: int) -> None:
        """Create an empty cache. `max_entries` is the maximum for both generations together."""
        self._max_generation_entries = max_entries // 2
        self.newer: dict[str, Ids] = {}
        """The newer generation of entries.

        Callers may search this dict themselves if they look up many texts. `find` also searches the
        older generation.
        """
        self._older: dict[str, Ids] = {}

    def __len__(self) -> int:
        return len(self.newer) + len(self._older)

    def find(self, texts: Iterable[str]) -> tuple[dict[str, Ids], list[str]]:
        """Return the ids of cached texts, and a list of the uncached texts without duplicates."""
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
        """Cache entries. Entries with too long texts or too many ids are ignored."""
        for text, ids in entries.items():
            if len(text) <= _MAX_CHARS and len(ids) <= _MAX_BYTES:
                self._put(text, ids)

    def _put(self, text: str, ids: Ids) -> None:
        if len(self.newer) >= self._max_generation_entries:
            self.newer, self._older = {}, self.newer
        self.newer[text] = ids
