"""Number of tokens of a text that comes in pieces: approximate on its way, exact at its end."""

from __future__ import annotations

from tokenizers import Tokenizer

# A piece of at most so many characters is most likely one token. Encoding it would cost as much as
# everything else.
_MAX_ONE_TOKEN_CHARS = 8
# Characters that are encoded at once, about 2 ms: a book encoded at its end would block the event
# loop.
_BLOCK_CHARS = 4096


class TextCount:
    """Counts with the tokenizer. `tokens` is the number so far, as if each piece stood alone.

    Settled text is counted in blocks that end before a space, where tokenizers begin a word. So the
    number is that of the complete text, or off by one for some of the blocks.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = 0
        self._pieces: list[str] = []
        self._size = 0
        self._next_block_at = _BLOCK_CHARS
        # Characters and tokens of the counted blocks.
        self._before = 0
        self._counted = 0

    def add(self, piece: str, settled: int) -> None:
        """Add the next piece. `settled` is the number of characters before it that will certainly
        count."""
        if not piece:
            return
        # The first piece may be the complete answer.
        short = len(piece) <= _MAX_ONE_TOKEN_CHARS and self.tokens > 0
        self.tokens += 1 if short else self._encode(piece)
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= self._next_block_at:
            self._close_block(settled - self._before)

    def text_from(self, start: int) -> str:
        """Return the text from index `start` on, which must not be in a counted block."""
        return "".join(self._pieces)[start - self._before :]

    def count_all(self, end: int | None = None) -> int:
        """Return the number of tokens of the text up to `end`, or of all of it."""
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
        # A text without spaces must not be joined again for each of its pieces.
        self._next_block_at = max(_BLOCK_CHARS, 2 * self._size)

    def _encode(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
