"""Token ids of bad words, for each way in which a tokenizer may encode a word within a text.

"Paris" has other ids at the beginning of a line than after a space. A byte-level tokenizer
distinguishes "Paris" from " Paris"; sentencepiece encodes a text alone as if it followed a space.
Clients mean both forms, and other servers block both.
"""

from __future__ import annotations

from tokenizers import Tokenizer

# Text before a word while the word is encoded. No token continues over a line break, and no
# tokenizer adds a space after a line break.
_CONTEXT = "\n"


def with_and_without_space(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return two forms of each word: at the beginning of a line, and after a space."""
    bare = [word.lstrip(" ") or word for word in words]
    return tuple(dict.fromkeys(form for word in bare for form in (word, f" {word}")))


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word, with and without a space before it."""
    forms = (_encode_inside(tokenizer, form) for form in with_and_without_space(words))
    return tuple(ids for ids in dict.fromkeys(forms) if ids)


def _encode_inside(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids that `text` has within another text, and not at its beginning."""

    def encode(given: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(given, add_special_tokens=False).ids)

    before, whole = encode(_CONTEXT), encode(_CONTEXT + text)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return encode(text)
