"""Splitting of a text into parts that can be encoded separately.

If the token ids of the parts are joined, the result must be the ids of the complete text. A text
may be split before a lone space, which is a space without other white space beside it. This is
correct only for tokenizers that begin a word at each lone space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

BLOCK_CHARS = 8192
# Maximum length of a block that is encoded on the event loop. Encoding takes 0.3 ms of CPU if the
# ids of all words are cached, and never more than 5 ms (tests/gateway/tokenization/test_word_ids
# has the slowest blocks). A longer block, whose text has too few lone spaces, is encoded by the
# Rust library tokenizers in a thread.
MAX_BLOCK_CHARS = 12_288
_MAX_SEARCHES = 64
# Maximum number of characters to search for a lone space, which takes up to 1 ms of CPU. If the
# search finds no lone space, the Rust library encodes the rest of the text.
_MAX_GAP_CHARS = 65_536


class LoneSpaces:
    """Splitter of texts at lone spaces, for a tokenizer that begins a word at each lone space."""

    def __init__(self, piece_start: re.Pattern[str]) -> None:
        """Prepare the search for lone spaces.

        `piece_start` is applied to the text after a lone space. It matches if the tokenizer begins
        a word at this space.
        """
        self._starts_piece = piece_start.match
        self._search = re.compile(rf" (?<=\S )(?={piece_start.pattern})").search

    def cut_blocks(self, text: str) -> Iterator[str]:
        """Yield the blocks of a text, which are split at lone spaces.

        The joined token ids of the blocks are the ids of the text. A block has at most
        `MAX_BLOCK_CHARS` characters, except if there is no lone space near the end of the block.
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
        """Return the pieces of a text to encode together, and the pieces to encode alone.

        A piece is the text between two spaces. If both spaces are lone, the piece can be encoded
        alone. Any other piece must be encoded together with its neighbours, as a range of pieces.
        The first piece of a text has no space before it, so it is always in a range.

        Args:
            pieces: the pieces of a text that was split at each space.
            indices: ascending indices of the pieces to encode. All other pieces are between lone
                spaces.

        Returns:
            The ranges of pieces to encode together, as pairs of the first and the last index. Then
            the indices of the pieces to encode alone.
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
        """Return the index at which a block ends: the last lone space before `end`.

        If no lone space is found before `end`, return the first lone space after `end`. If none is
        found there either, return the length of the text. Both searches are limited.
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
