"""Words that must not come, as the engine knows them: by each of the ways in which they are tokens.

"Paris" at the beginning of a line and in the middle of one are other ids, with a byte-level
tokenizer ("Paris", " Paris") as with sentencepiece, where a text alone is as if it came behind a
space. Clients mean both, and other servers take it so.
"""

from __future__ import annotations

from tokenizers import Tokenizer

# No token goes on over it, and behind it no tokenizer adds a space.
_CONTEXT = "\n"


def with_and_without_space(words: tuple[str, ...]) -> tuple[str, ...]:
    """Each word as it is at the beginning of a line, and behind a space."""
    bare = [word.lstrip(" ") or word for word in words]
    return tuple(dict.fromkeys(form for word in bare for form in (word, f" {word}")))


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The ids of each word, with and without a space before it."""
    forms = (_encode_inside(tokenizer, form) for form in with_and_without_space(words))
    return tuple(ids for ids in dict.fromkeys(forms) if ids)


def _encode_inside(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The ids of `text` in the middle of another one."""

    def encode(given: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(given, add_special_tokens=False).ids)

    before, whole = encode(_CONTEXT), encode(_CONTEXT + text)
    if whole[: len(before)] == before:
        return whole[len(before) :]
    return encode(text)
