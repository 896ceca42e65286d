"""Positions where a text can be cut without changing the ids of its parts.

A space is lone if there is no other white space beside it. If a word begins at each lone space, the
text before a lone space and the text from there on can be encoded separately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

BLOCK_CHARS = 8192
# A block of known words takes 0.3 ms of CPU, and any other block at most 5 ms (the slowest ones are
# in tests/gateway/tokenization/test_word_ids). A longer text without lone spaces is left to the
# library, which encodes the text in a thread.
MAX_BLOCK_CHARS = 12_288
_MAX_SEARCHES = 64
# Maximum length of a search for a lone space: a longer one takes more than 1 ms of CPU at once. If
# so many characters have no lone space, the rest of the text is left to the library.
_MAX_GAP_CHARS = 65_536


class LoneSpaces:
    """Search for lone spaces at which a word begins, for one tokenizer."""

    def __init__(self, piece_start: re.Pattern[str]) -> None:
        """Compile the search.

        `piece_start` matches the text after a lone space if a word begins at that space.
        """
        self._starts_piece = piece_start.match
        self._search = re.compile(rf" (?<=\S )(?={piece_start.pattern})").search

    def cut_blocks(self, text: str) -> Iterator[str]:
        """Yield the blocks of a text. The ids of all blocks, joined, are the ids of the text.

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
        """Return the ranges of pieces to encode together, and the pieces to encode alone.

        A piece between two lone spaces is encoded alone. Any other piece is encoded together with
        its neighbours. A range is a pair of indices, both included. The first piece of a text has
        no space before it, so it is always in a range.

        Args:
            pieces: a text that was split at its spaces.
            indices: the indices of the pieces to sort, ascending. All other pieces are between lone
                spaces.
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
        """Return the index at which to end a block: the last lone space before `end`, if any.

        Otherwise return the first lone space after `end`, or the end of the text if no lone space
        is near.
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
