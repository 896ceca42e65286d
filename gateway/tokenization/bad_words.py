"""Token ids of bad words, in each of the ways in which text can be tokenized to them.

"Paris" has other ids at the beginning of a line than within it: with a byte-level tokenizer
("Paris", " Paris") as with sentencepiece, which encodes a text alone as if it followed a space.
Clients mean both forms, and other servers block both.
"""

from __future__ import annotations

from tokenizers import Tokenizer

# No token continues over a line break, and no tokenizer adds a space after it.
_CONTEXT = "\n"


def with_and_without_space(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return each word as at the beginning of a line, and after a space."""
    bare = [word.lstrip(" ") or word for word in words]
    return tuple(dict.fromkeys(form for word in bare for form in (word, f" {word}")))


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word, with and without a space before it."""
    forms = (_encode_inside(tokenizer, form) for form in with_and_without_space(words))
    return tuple(ids for ids in dict.fromkeys(forms) if ids)


def _encode_inside(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of `text` in the middle of another text."""

    def encode(given: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(given, add_special_tokens=False).ids)

    before, whole = encode(_CONTEXT), encode(_CONTEXT + text)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return encode(text)
