"""Token ids of short texts without the tokenizer: a text is cut into words whose ids are kept.

A byte-level BPE first cuts at its added tokens, then by a regular expression, and merges within
each piece alone. So the ids of a text are those of its pieces, and English repeats its own. Each
piece's ids come from the tokenizers library once; only the cutting is done here, by the same
expression for Python's `re` (`word_pattern`). All other texts, and all other kinds of tokenizers,
are left to the library.

Where words begin at single spaces, as those of all these tokenizers in use do, what lies between
two spaces ("end.\\n\\nThen") is kept with the ids of its words, and only what is new is cut.
"""

from __future__ import annotations

import logging
import random
import re
from array import array
from collections.abc import Iterator
from itertools import islice, product
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer, pre_tokenizers

from gateway.tokenization.control_tokens import any_of
from gateway.tokenization.word_pattern import (
    ALPHABET,
    NONE,
    char_class,
    pattern_of,
    translated,
    words_begin_at_spaces,
)

log = logging.getLogger(__name__)

# Of each kind; one takes 400 bytes at most, as what is longer and has more ids is not kept.
_ROOM = 16_384
_LONGEST = 64
_MOST_IDS = 16
# Characters: of a shorter text all words are cut, which takes less than to look for its spaces.
_FEW = 100
_SAMPLES = 400
_LONG_SAMPLES = 20

_ID_BYTES = array("i").itemsize
Ids = bytes
"""As an `array("i")` holds them."""


class _Cut(NamedTuple):
    """Words of what lies between spaces, of the numbers from `start` to before `end`."""

    start: int
    end: int
    words: list[str]


class WordIds:
    """Knows one tokenizer's words. `of` makes them."""

    def __init__(
        self, tokenizer: Tokenizer, words: re.Pattern[str], added: dict[str, int], *, spaced: bool
    ) -> None:
        self._words = words.findall
        self._plain = re.compile(f"[{char_class(ALPHABET)}]*").fullmatch
        self._cut = re.compile(f"({any_of(added)})").split if added else None
        self._added = {token: _bytes([token_id]) for token, token_id in added.items()}
        self._spaced = spaced
        self._known: dict[str, Ids] = {}
        # By what follows a space that begins a word, up to the next such.
        self._after_space: dict[str, Ids] = {}
        self._alone = Tokenizer(tokenizer.model)
        each = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        between = pre_tokenizers.Split(NONE, "removed")
        self._alone.pre_tokenizer = pre_tokenizers.Sequence([between, each])
        self._before = _bytes(tokenizer.encode("").ids)

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: dict[str, Any]) -> WordIds | None:
        """None for a tokenizer of another kind, and for one that was found to differ.

        `definition` is the tokenizer's JSON, which may lack the vocabulary.
        """
        pattern, added = pattern_of(definition), _added(definition)
        words = None if pattern is None else translated(pattern)
        if (
            pattern is None
            or words is None
            or added is None
            or tokenizer.truncation
            or tokenizer.padding
        ):
            return None
        found = cls(tokenizer, words, added, spaced=words_begin_at_spaces(pattern))
        # What goes before a text does not depend on it: with it for one, without it for the next.
        for number, text in enumerate(_samples(list(added))):
            special = number % 2 == 1
            ids = found.encode(text, add_special_tokens=special)
            meant = tokenizer.encode(text, add_special_tokens=special).ids
            if ids is not None and ids.tolist() != meant:
                log.warning("words have other ids than their text, and are not kept: %r", text)
                return None
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int] | None:
        """None where the library has to do it."""
        found = [self._before] if add_special_tokens else []
        ascii_alone = text.isascii()
        for place, part in enumerate(self._cut(text) if self._cut else (text,)):
            if place % 2:
                found.append(self._added[part])
            elif ascii_alone or self._plain(part):
                found += self._ids_of(part)
            else:
                return None
        return array("i", b"".join(found))

    def _ids_of(self, text: str) -> list[Ids]:
        if not self._spaced or len(text) < _FEW:
            return self._of_words(self._words(text))
        between = text.split(" ")
        if between[0][-1:].isspace():
            return self._of_new(between)
        known = self._after_space
        try:
            found = [known[each] for each in between[1:]]
        except KeyError:
            return self._of_new(between)
        return [*self._of_words(self._words(between[0])), *found]

    def _of_new(self, between: list[str]) -> list[Ids]:
        """Of what lies between spaces, where some is not known: that alone is cut into words."""
        found: list[Ids | None] = [None, *map(self._after_space.get, between[1:]), None]
        cuts, at = [], 0
        while (start := found.index(None, at)) < len(between):
            end = start + 1
            if start > at and not _is_apart(between, start):
                start -= 1
            while end < len(between) and not _is_apart(between, end):
                end += 1
            piece = " ".join(between[start:end])
            cuts.append(_Cut(start, end, self._words(f" {piece}" if start else piece)))
            at = end
        of_words = iter(self._of_words([word for cut in cuts for word in cut.words]))
        whole: list[Ids] = []
        new, at = {}, 0
        for start, end, words in cuts:
            whole += cast("list[Ids]", found[at:start])
            whole.append(ids := b"".join(islice(of_words, len(words))))
            piece = between[start]
            if start and end == start + 1 and not piece[-1].isspace():
                new[piece] = ids
            at = end
        whole += cast("list[Ids]", found[at:-1])
        self._after_space = _with(self._after_space, new)
        return whole

    def _of_words(self, words: list[str]) -> list[Ids]:
        known = self._known
        try:
            return [known[word] for word in words]
        except KeyError:
            learned = self._learned([word for word in dict.fromkeys(words) if word not in known])
            return [learned[word] if word in learned else known[word] for word in words]

    def _learned(self, words: list[str]) -> dict[str, Ids]:
        of_words = [array("i") for _ in words]
        encoding = self._alone.encode(NONE.join(words))
        for place, token_id in zip(encoding.word_ids, encoding.ids, strict=True):
            assert place is not None  # as for special tokens, of which it has none
            of_words[place].append(token_id)
        found = {word: ids.tobytes() for word, ids in zip(words, of_words, strict=True)}
        self._known = _with(self._known, found)
        return found


def _bytes(ids: list[int]) -> Ids:
    return array("i", ids).tobytes()


def _is_apart(between: list[str], number: int) -> bool:
    """Whether it begins a word with the space before it: see `words_begin_at_spaces`."""
    before, after = between[number - 1], between[number]
    if not after or not (before or number == 1):
        return False
    return not (after[0].isspace() or after[0].isnumeric() or before[-1:].isspace())


def _with(kept: dict[str, Ids], new: dict[str, Ids]) -> dict[str, Ids]:
    """Never emptied, but replaced: another thread may be at it."""
    fit = {
        text: ids
        for text, ids in new.items()
        if len(text) <= _LONGEST and len(ids) <= _MOST_IDS * _ID_BYTES
    }
    if len(kept) + len(fit) > _ROOM:
        return fit
    kept.update(fit)
    return kept


def _added(definition: dict[str, Any]) -> dict[str, int] | None:
    """The added tokens; None if some are not found wherever their text is, in one search."""
    tokens = definition["added_tokens"]
    strange = any(t["single_word"] or t["lstrip"] or t["rstrip"] for t in tokens)
    # `any_of` goes as deep as a token is long.
    long = any(len(t["content"]) > _LONGEST for t in tokens)
    if strange or long or len({t["normalized"] for t in tokens}) > 1:
        return None
    if definition["normalizer"] is not None and any(t["normalized"] for t in tokens):
        return None
    return {t["content"]: t["id"] for t in tokens}


def _samples(tokens: list[str]) -> Iterator[str]:
    """Texts to compare by: the same at each start."""
    yield from (f"{char}a{char}1{char}{char} {char}" for char in ALPHABET)
    kinds = ["a", "S", "é", "ª", "1", "²", " ", "\xa0", "\n", "\r", "\t", "'", "!", "/", "—"]
    yield from map("".join, product(kinds, kinds))
    draw = random.Random(0)
    more = [*kinds, "'s", "'LL", "the", " of", *draw.sample(tokens, min(8, len(tokens)))]
    for _ in range(_SAMPLES):
        yield "".join(draw.choices(more, k=draw.randint(3, 24)))
    for token in draw.sample(tokens, min(64, len(tokens))):
        yield f"a{token} {token[:-1]}{token}"
    for _ in range(_LONG_SAMPLES):
        text = " ".join(draw.choices(more, k=_FEW))
        yield text
        yield text  # of which more is known now
