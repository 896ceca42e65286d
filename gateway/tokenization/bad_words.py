"""Token ids of bad words, which an engine must not generate.

A word has different ids at the beginning of a line ("Paris") and after a space (" Paris"). If a
word is encoded alone, a byte-level tokenizer returns the ids for the beginning of a line, and
sentencepiece returns the ids after a space. Clients want to exclude the word in both positions, so
this module returns both id sequences.
"""

from __future__ import annotations

from tokenizers import Tokenizer

# Text after which a word is encoded. No token extends over a line break, and no tokenizer adds a
# space after a line break. The ids that follow the line break's ids are therefore the word's ids.
_CONTEXT = "\n"


def with_and_without_space(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return each word twice: without a space before it, and with a space before it."""
    bare = [word.lstrip(" ") or word for word in words]
    return tuple(dict.fromkeys(form for word in bare for form in (word, f" {word}")))


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return two id sequences for each word: without and with a space before the word."""
    forms = (_encode_inside(tokenizer, form) for form in with_and_without_space(words))
    return tuple(ids for ids in dict.fromkeys(forms) if ids)


def _encode_inside(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids that `text` has after other text: the tokenizer adds no space before it."""

    def encode(given: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(given, add_special_tokens=False).ids)

    before, whole = encode(_CONTEXT), encode(_CONTEXT + text)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return encode(text)
