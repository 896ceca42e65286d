"""Texts of the prompts that `bench.prompts` measures.

There are three kinds: passages from the project's Markdown pages, new sentences made of words from
these pages, and words of random letters.
"""

from __future__ import annotations

import random
import re
from functools import cache

from bench.machine import ROOT
from bench.measure import encode

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Fraction of the words in a new passage that are made of random letters.
_NEW_SHARE = 0.03
_CALIBRATION_CHARS = 60_000


@cache
def pages() -> tuple[str, str]:
    """Return two texts, each with one half of the project's Markdown pages."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
    texts = [file.read_text(encoding="utf-8") for file in files]
    return "\n\n".join(texts[::2]), "\n\n".join(texts[1::2])


def cut_passages(text: str, tokens: int) -> list[str]:
    """Cut a text into passages of about `tokens` tokens, which do not overlap."""
    size = round(tokens * _chars_per_token(text))
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]


def draw_page_passage(draw: random.Random, tokens: int) -> str:
    """Return a random passage from the first text of `pages`."""
    text, _ = pages()
    # Repeat the text if necessary, because a passage may be longer than the text.
    size = round(tokens * _chars_per_token(text))
    start = draw.randrange(len(text))
    return (text[start:] + text * (1 + size // len(text)))[:size].lstrip()


def draw_new_passage(draw: random.Random, tokens: int) -> str:
    """Return random sentences of about `tokens` tokens.

    Most words are from the project's pages: the n-th most frequent word has a probability
    proportional to 1 / n. A few words are made of random letters.
    """
    words, weights = _vocabulary()
    size = round(tokens * _chars_per_token(_sentences(random.Random(0), words, weights, 10_000)))
    return _sentences(draw, words, weights, size)


def draw_random_words(draw: random.Random, chars: int) -> str:
    words = (_word(draw) for _ in range(chars // 4 + 1))
    return " ".join(words)[:chars]


def _sentences(draw: random.Random, words: list[str], weights: list[float], chars: int) -> str:
    drawn = draw.choices(words, cum_weights=weights, k=chars // 4 + 1)
    written = []
    for place, known in enumerate(drawn):
        word = known if draw.random() >= _NEW_SHARE else _word(draw)
        match place % 14:
            case 0:
                word = word.capitalize()
            case 6:
                word += ","
            case 13:
                word += ".\n\n" if place % 70 == 69 else "."
        written.append(word)
    return " ".join(written).replace("\n ", "\n")[:chars]


@cache
def _vocabulary() -> tuple[list[str], list[float]]:
    """Return the words of all pages, most frequent first, and the cumulative sums of 1 / rank."""
    counts: dict[str, int] = {}
    for word in re.findall(r"[A-Za-z]+", "".join(pages())):
        counts[word.lower()] = counts.get(word.lower(), 0) + 1
    words = sorted(counts, key=lambda word: -counts[word])
    weights, total = [], 0.0
    for rank in range(1, len(words) + 1):
        total += 1 / rank
        weights.append(total)
    return words, weights


@cache
def _chars_per_token(text: str) -> float:
    text = text[:_CALIBRATION_CHARS]
    return len(text) / len(encode(text))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(_LETTERS, k=draw.randint(3, 9)))
