"""Sample texts for a check at start-up of the encoder that joins the cached token ids of words.

The encoder must return the same ids for these texts as the Rust library tokenizers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from gateway.tokenization.word_pattern import ALPHABET

_SAMPLES = 400
_LONG_SAMPLES = 20


def make_samples(tokens: list[str], long: int) -> Iterator[str]:
    """Yield the sample texts, which are the same at each start.

    Some samples contain added tokens, chosen from `tokens`. Long samples have `long` words.
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
    # Yield long texts without added tokens. Added tokens would split a text into parts that may be
    # too short for the caching of pieces (see `word_ids`).
    solid = ["a", "S", "é", "'", "!", "/", "—", "a's", "the", ",", "a\nS", "!\r\n\n1", "1", "²"]
    for number in range(_LONG_SAMPLES):
        text = " ".join(draw.choices([*solid, "", "\n", "a\n"] if number % 2 else solid, k=long))
        yield text
        yield text  # again: its pieces are cached now
