"""Cache of token ids by text, with a maximum number of entries.

Texts that occur often remain in the cache even if many new texts are added.

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
    """Cache that consists of two parts (generations) of equal maximum size.

    New entries are added to the newer generation. When it is full, the older generation is dropped,
    and an empty newer generation is started. If an entry of the older generation is used, it moves
    to the newer generation. Common texts therefore remain in the cache, and no entry needs to store
    the time of its last use.
    """

    def __init__(self, max_entries: int) -> None:
        """Create an empty cache. `max_entries` is the maximum for both generations together."""
        self._max_generation_entries = max_entries // 2
        self.newer: dict[str, Ids] = {}
        """The newer generation of entries.

        A caller that looks up many texts may search this dict directly, which is faster. `find`
        also searches the older generation.
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
        """Add entries to the cache. Ignore an entry if its text is too long or has too many ids."""
        for text, ids in entries.items():
            if len(text) <= _MAX_CHARS and len(ids) <= _MAX_BYTES:
                self._put(text, ids)

    def _put(self, text: str, ids: Ids) -> None:
        if len(self.newer) >= self._max_generation_entries:
            self.newer, self._older = {}, self.newer
        self.newer[text] = ids
