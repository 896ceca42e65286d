"""Positions where a text can be cut without changing the ids of its parts.

A space is lone if there is no other white space beside it. If a word begins at each lone space, the
text before a lone space and the text from there on can be encoded separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

BLOCK_CHARS = 8192
# A block of known words takes 0.3 ms of CPU, of others at most 5 ms (all of the longest are in
# tests/gateway/tokenization/test_word_ids). Longer texts without lone spaces are left to the
# library, which encodes them in a thread.
MAX_BLOCK_CHARS = 12_288
_MAX_SEARCHES = 64
# A longer search takes more than 1 ms of CPU at once. If so many characters have no lone space,
# they and all that follows are left to the library.
_MAX_GAP_CHARS = 65_536


class LoneSpaces:
    """The lone spaces at which a word begins, for one tokenizer."""

    def __init__(self, piece_start: re.Pattern[str]) -> None:
        """Compile the search. `piece_start` must match after such a space."""
        self._starts_piece = piece_start.match
        self._search = re.compile(rf" (?<=\S )(?={piece_start.pattern})").search

    def cut_blocks(self, text: str) -> Iterator[str]:
        """Cut a text into blocks whose ids, joined, are the ids of the text.

        A block is longer than `MAX_BLOCK_CHARS` only if the text cannot be cut near its limit.
        """
        start = 0
        while len(text) - start > MAX_BLOCK_CHARS:
            end = self._block_end(text, start, start + BLOCK_CHARS)
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def find_spans(
        self, pieces: Sequence[str], indices: Sequence[int]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Return which pieces are not between two lone spaces, and which are.

        Args:
            pieces: a text that was split at its spaces.
            indices: the pieces to sort, in order; all others are between lone spaces.

        The former are ranges of pieces that have to be encoded together, with both ends. The first
        piece of a text, which has no space before it, is in one of them.
        """
        spans: list[tuple[int, int]] = []
        others: list[int] = []
        for index in indices:
            piece = pieces[index]
            starts = index == 0 or self._starts_piece(piece) is not None
            ends = piece != "" and not piece[-1].isspace()
            if starts and ends and index:
                others.append(index)
                continue
            first, last = index - (not starts), min(index + (not ends), len(pieces) - 1)
            if spans and first <= spans[-1][1]:
                first, _ = spans.pop()
            spans.append((first, last))
        covered = {index for first, last in spans for index in range(first, last + 1)}
        return spans, [index for index in others if index not in covered]

    def _block_end(self, text: str, start: int, end: int) -> int:
        """Return the index of the last lone space before `end`, else of the first one after it.

        Return the end of the text if no lone space is near.
        """
        space = end
        for _ in range(_MAX_SEARCHES):
            space = text.rfind(" ", start + 1, space)
            if space < 0:
                break
            if self._is_lone(text, space):
                return space
        found = self._search(text, end, end + _MAX_GAP_CHARS)
        return len(text) if found is None else found.start()

    def _is_lone(self, text: str, space: int) -> bool:
        return not text[space - 1].isspace() and self._starts_piece(text, space + 1) is not None
