"""How many tokens a text is that comes in pieces: roughly on its way, all of it at its end."""

from __future__ import annotations

from tokenizers import Tokenizer

# In characters: a piece that is most likely one token. To encode it would cost what all else does.
_MAX_ONE_TOKEN_CHARS = 8
# So much is encoded at once, some 2 ms: a book at its end would hold up everybody's tokens.
_BLOCK_CHARS = 4096


class TextCount:
    """Counts with the tokenizer. `tokens` is the number so far, as if each piece stood alone.

    What is certain to stay is counted in blocks, which end before a space: where tokenizers begin a
    word. So the number is that of the whole text, or off by one for some of the blocks.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = 0
        self._pieces: list[str] = []
        self._size = 0
        self._next_block_at = _BLOCK_CHARS
        # Of blocks: characters and tokens.
        self._before = 0
        self._counted = 0

    def add(self, piece: str, settled: int) -> None:
        """The next piece. Of the text before it, `settled` characters will count in any case."""
        if not piece:
            return
        # The first may be all that comes.
        short = len(piece) <= _MAX_ONE_TOKEN_CHARS and self.tokens > 0
        self.tokens += 1 if short else self._encode(piece)
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= self._next_block_at:
            self._close_block(settled - self._before)

    def text_from(self, start: int) -> str:
        """The text from a place on that is not settled."""
        return "".join(self._pieces)[start - self._before :]

    def count_all(self, end: int | None = None) -> int:
        """The tokens of the text up to a place that is not settled, else of all."""
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
        # A text without spaces is not joined again for each of its pieces.
        self._next_block_at = max(_BLOCK_CHARS, 2 * self._size)

    def _encode(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
