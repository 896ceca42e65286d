"""Token ids of bad words, which an engine must not generate.

A word has different ids at the beginning of a line ("Paris") and after a space (" Paris"). A
byte-level tokenizer encodes a word alone as if it began a line, and sentencepiece as if it followed
a space. Clients want to exclude the word in both positions, so both id sequences are returned.
"""

from __future__ import annotations

from tokenizers import Tokenizer

# Text that is put before a word to encode the word as in the middle of a text. No token extends
# over a line break, and no tokenizer adds a space after a line break.
_CONTEXT = "\n"


def with_and_without_space(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return each word twice: without and with a space before it."""
    bare = [word.lstrip(" ") or word for word in words]
    return tuple(dict.fromkeys(form for word in bare for form in (word, f" {word}")))


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word, with and without a space before it."""
    forms = (_encode_inside(tokenizer, form) for form in with_and_without_space(words))
    return tuple(ids for ids in dict.fromkeys(forms) if ids)


def _encode_inside(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids that `text` has in the middle of a longer text."""

    def encode(given: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(given, add_special_tokens=False).ids)

    before, whole = encode(_CONTEXT), encode(_CONTEXT + text)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return encode(text)
