"""Token counts of streamed text, counted in blocks instead of one call for a long text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from gateway.tokenization.text_count import TextCount
from tests.support.triton_server import MODEL

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
WORDS = ("the", "capital", "of", "\u65e5\u672c", "is,", "(1)", "\n", "caf\u00e9", "", "a" * 30)


class Recorder:
    """A tokenizer that records the length of the longest text it encoded."""

    longest = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> object:
        self.longest = max(self.longest, len(text))
        return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)


def pieces_of(text: str, draw: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = draw.choice((1, 3, 5, 8, 40))
        pieces.append(text[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("seed", range(4))
def test_blocks_count_as_the_text_does(seed: int) -> None:
    draw = random.Random(seed)
    text = " ".join(draw.choices(WORDS, k=8000))
    recorder = Recorder()
    count, settled = TextCount(recorder), 0
    for piece in pieces_of(text, draw):
        count.add(piece, max(0, settled - 20))
        settled += len(piece)
    end = len(text) - 10
    assert count.text_from(end) == text[end:]
    assert count.count_all(end) == tokens_of(text[:end])
    assert count.count_all() == tokens_of(text)
    assert recorder.longest < 5000
    assert count.tokens > tokens_of(text) / 2


def test_a_text_without_spaces_is_counted_whole() -> None:
    text = "\u65e5\u672c\u8a9e" * 5000
    count = TextCount(TOKENIZER)
    for at in range(0, len(text), 5):
        count.add(text[at : at + 5], at)
    assert count.count_all() == tokens_of(text)


def tokens_of(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False).ids)
