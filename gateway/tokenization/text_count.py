"""Counting of the tokens of a streamed text: an estimate for each piece, more exact at the end."""

from __future__ import annotations

from tokenizers import Tokenizer

# Maximum length of a piece that is counted as one token without encoding the piece. Encoding would
# cost as much CPU as all other processing of the piece.
_MAX_ONE_TOKEN_CHARS = 8
# Number of characters that are encoded at once, which takes about 2 ms. While a long text is
# received, it is encoded in blocks of this size. Encoding the complete text at its end would block
# the event loop.
_BLOCK_CHARS = 4096


class TextCount:
    """Counter of the tokens of one text that arrives in pieces.

    `tokens` is an estimate of the number of tokens so far: each piece is counted alone. The result
    of `count_all` is more exact, because the text is encoded in larger blocks. A block ends before
    a space, where most tokenizers begin a word. The count of a few blocks
    may be wrong by one token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = 0
        self._pieces: list[str] = []
        self._size = 0
        self._next_block_at = _BLOCK_CHARS
        # Number of characters in the blocks that were counted, and number of tokens in these
        # blocks.
        self._before = 0
        self._counted = 0

    def add(self, piece: str, settled: int) -> None:
        """Add the next piece of the text.

        `settled` is the number of characters that were sent to the client before this piece.
        """
        if not piece:
            return
        # Encode the first piece even if it is short, because it may be the complete response.
        short = len(piece) <= _MAX_ONE_TOKEN_CHARS and self.tokens > 0
        self.tokens += 1 if short else self._encode(piece)
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= self._next_block_at:
            self._close_block(settled - self._before)

    def text_from(self, start: int) -> str:
        """Return the text from index `start` to its end. `start` must not be in a counted block."""
        return "".join(self._pieces)[start - self._before :]

    def count_all(self, end: int | None = None) -> int:
        """Return the number of tokens of the text before index `end`; None means the end."""
        rest = "".join(self._pieces)
        return self._counted + self._encode(rest if end is None else rest[: end - self._before])

    def _close_block(self, settled: int) -> None:
        rest = "".join(self._pieces)
        end = rest.rfind(" ", 1, max(settled, 1))
        if end > 0:
            self._counted += self._encode(rest[:end])
            self._before += end
            rest = rest[end:]
        self._pieces, self._size = [rest], len(rest)
        # Try to close a block again only when the remaining text has doubled. Otherwise, all pieces
        # of a text without spaces would be joined again for each new piece.
        self._next_block_at = max(_BLOCK_CHARS, 2 * self._size)

    def _encode(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
