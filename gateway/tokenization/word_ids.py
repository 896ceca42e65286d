"""Token ids of short texts without the tokenizer: a text is cut into words whose ids are kept.

A byte-level BPE first cuts at its added tokens, then by a regular expression, and merges within
each piece alone. So the ids of a text are those of its pieces, and English repeats its own. Each
piece's ids come from the tokenizers library once; only the cutting is done here, by the same
expression for Python's `re` (`word_pattern`). All other texts, and all other kinds of tokenizers,
are left to the library.

Where a word begins at each lone space, as those of GPT-2, GPT-4o, Llama 3 and Qwen do, what stands
between two of them ("end.\\n\\nThen"), a piece, is kept with the ids of its words.
"""

from __future__ import annotations

import logging
import random
import re
from array import array
from collections.abc import Iterator
from itertools import product
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from gateway.tokenization.control_tokens import any_of
from gateway.tokenization.word_pattern import (
    ALPHABET,
    NONE,
    char_class,
    pattern_of,
    piece_of,
    translated,
)

log = logging.getLogger(__name__)

# Of each kind; one takes 400 bytes at most, as what is longer and has more ids is not kept.
_ROOM = 16_384
_LONGEST = 64
_MOST_IDS = 16
# Characters: of a shorter text all words are cut, which takes less than to look for its pieces.
_FEW = 100
# Pieces that a text may bring: of one with more all words are cut, and only so many are kept.
_MOST_NEW = 64
_SAMPLES = 400
_LONG_SAMPLES = 20

_ID_BYTES = array("i").itemsize
Ids = bytes
"""As an `array("i")` holds them."""


class WordIds:
    """Knows one tokenizer's words. `of` makes them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        words: re.Pattern[str],
        piece: re.Pattern[str] | None,
        added: dict[str, int],
    ) -> None:
        self._words = words.findall
        self._plain = re.compile(f"[{char_class(ALPHABET)}]*").fullmatch
        self._cut = re.compile(f"({any_of(added)})").split if added else None
        self._added = {token: _bytes([token_id]) for token, token_id in added.items()}
        self._is_piece = piece and piece.fullmatch
        self._known: dict[str, Ids] = {}
        # Of a piece with the space before it, which is not in its key.
        self._pieces: dict[str, Ids] = {}
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
        found = cls(tokenizer, words, piece_of(pattern), added)
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
        found = self._of_pieces(text)
        return self._of_words(self._words(text)) if found is None else found

    def _of_pieces(self, text: str) -> list[Ids] | None:
        """None where it is not worth it: a short text, spaces that are not alone, much new."""
        is_piece = self._is_piece
        if is_piece is None or len(text) < _FEW:
            return None
        # Most texts with a space that is not alone; others have what is no piece, below.
        if "  " in text or " \n" in text or "\n " in text:
            return None
        first, *pieces = text.split(" ")
        # What is before the first space and behind the last may have white space at its other end.
        last = pieces.pop() if pieces else ""
        if first[-1:].isspace() or not is_piece(last[:1]):
            return None
        known = self._pieces
        try:
            found = [known[piece] for piece in pieces]
        except KeyError:
            new = [piece for piece in dict.fromkeys(pieces) if piece not in known]
            if not all(map(is_piece, new)):
                return None
            learned = self._learned_pieces(new[:_MOST_NEW])
            if len(learned) < len(new):
                return None
            found = [learned[piece] if piece in learned else known[piece] for piece in pieces]
        before, behind = self._words(first), self._words(f" {last}")
        return [*self._of_words(before), *found, *self._of_words(behind)]

    def _learned_pieces(self, pieces: list[str]) -> dict[str, Ids]:
        words = self._words("".join([f" {piece}" for piece in pieces]))
        of_pieces: list[list[Ids]] = []
        for word, ids in zip(words, self._of_words(words), strict=True):
            if word[0] == " ":  # which is nowhere in a piece but before it
                of_pieces.append([])
            of_pieces[-1].append(ids)
        found = {piece: b"".join(ids) for piece, ids in zip(pieces, of_pieces, strict=True)}
        self._pieces = _with(self._pieces, found)
        return found

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


def _with(kept: dict[str, Ids], new: dict[str, Ids]) -> dict[str, Ids]:
    """`kept` with what of `new` is small; that alone where there is no room for both.

    A full one is not emptied, but replaced: another thread may be at it.
    """
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
    # Of pieces alone: a text is cut at an added token, and what lies beside it may be short.
    solid = ["a", "S", "é", "'", "!", "/", "—", "a's", "the", ",", "a\nS", "!\r\n\n1", "1", "²"]
    for number in range(_LONG_SAMPLES):
        text = " ".join(draw.choices(solid[: -2 if number % 2 else None], k=_FEW))
        yield text
        yield text  # which is known now
