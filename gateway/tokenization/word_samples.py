"""Sample texts for the check at start-up that word-based ids equal the library's ids."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from gateway.tokenization.word_pattern import ALPHABET

_SAMPLES = 400
_LONG_SAMPLES = 20


def make_samples(tokens: list[str], long: int) -> Iterator[str]:
    """Yield the sample texts, which are the same at each start.

    Some contain a few of the added tokens `tokens`. Long texts have `long` words.
    """
    yield from (f"{char}a{char}1{char}{char} {char}" for char in ALPHABET)
    kinds = ["a", "S", "é", "ª", "1", "²", " ", "\xa0", "\n", "\r", "\t", "'", "!", "/", "—"]
    yield from map("".join, product(kinds, kinds))
    draw = random.Random(0)
    more = [*kinds, "'s", "'LL", "the", " of", *draw.sample(tokens, min(8, len(tokens)))]
    for _ in range(_SAMPLES):
        yield "".join(draw.choices(more, k=draw.randint(3, 24)))
    for token in draw.sample(tokens, min(64, len(tokens))):
        yield f"a{token} {token[:-1]}{token}"
    # Long texts without added tokens. The others may be too short for pieces, as they are cut at
    # added tokens.
    solid = ["a", "S", "é", "'", "!", "/", "—", "a's", "the", ",", "a\nS", "!\r\n\n1", "1", "²"]
    for number in range(_LONG_SAMPLES):
        text = " ".join(draw.choices([*solid, "", "\n", "a\n"] if number % 2 else solid, k=long))
        yield text
        yield text  # again, with its pieces cached
