"""Token ids of a text from those of its words, which are cached.

A byte-level BPE first cuts at its added tokens, then by a regular expression, and merges within
each word alone. So the ids of a text are those of its words, and prose repeats its words. Each
word's ids come from the tokenizers library once. Only the cutting is done here, by the same
expression for Python's `re` (`word_pattern`). All other kinds of tokenizers, and texts of mostly
new words, are left to the library.

Where a word begins at each lone space, as those of GPT-2, GPT-4o, Llama 3 and Qwen do, the ids of
each piece between two lone spaces are cached as well. A long text can be cut there into blocks,
each of which is encoded alone.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, cast

from tokenizers import Tokenizer

from gateway.tokenization.control_tokens import any_of
from gateway.tokenization.vocabulary import BYTE_OF
from gateway.tokenization.word_cache import Ids, WordCache
from gateway.tokenization.word_pattern import (
    ALPHABET,
    char_class,
    pattern_of,
    piece_start_of,
    translated,
)
from gateway.tokenization.word_samples import samples

log = logging.getLogger(__name__)

_MAX_WORDS, _MAX_PIECES = 16_384, 32_768
_BLOCK_CHARS = 8192
# A block of known words takes 0.3 ms of CPU, of others at most 3 ms. A longer text without lone
# spaces is left to the library, which encodes it in a thread.
MAX_BLOCK_CHARS = 12_288
# Finding the pieces of a shorter text takes more CPU than cutting it into words.
_MIN_PIECES_CHARS = 100
# To cache a new word takes twice the CPU that the library takes for it. So a text with a larger
# share of them is left to the library, and only a few of them are cached.
_MAX_NEW_SHARE = 0.3
_MIN_NEW_CHARS = 128
_LEARNED_SHARE = 1 / 64
_SAMPLE_PIECES = 32
_MAX_EDGE_SEARCHES = 64
# Added tokens and the texts between them, each of which takes 3 us besides its words.
_MAX_PARTS = 512
# An added token that is longer makes an expression that is nested too deeply.
_MAX_ADDED_CHARS = 64

_CHARACTER_OF = {byte: char for char, byte in BYTE_OF.items()}


class WordIds:
    """Cached words of one tokenizer. `of` makes instances; each belongs to one thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        words: re.Pattern[str],
        piece_start: re.Pattern[str] | None,
        added: dict[str, int],
    ) -> None:
        self._cut_words = words.findall
        self._is_plain = re.compile(f"[{char_class(ALPHABET)}]*").fullmatch
        self._set_added(added)
        # What no text stands for.
        self._control_ids: frozenset[int] = frozenset()
        self._starts_piece = piece_start and piece_start.match
        # A block must not end within an added token.
        self._has_blocks = piece_start is not None and not any(" " in token for token in added)
        self._words = WordCache(_MAX_WORDS)
        # The ids of a piece include the space before it; its key does not.
        self._pieces = WordCache(_MAX_PIECES)
        self._sampled = 0
        self._tokenizer = tokenizer
        self._tokenize_word = tokenizer.model.tokenize
        self.opening = array("i", tokenizer.encode("").ids)
        """The special tokens that the tokenizer puts before a text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: dict[str, Any]) -> WordIds | None:
        """Return None for a tokenizer of another kind, and for one that was found to differ.

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
        found = cls(tokenizer, words, piece_start_of(pattern), added)
        # The opening is the same for all texts: every second sample is encoded with it.
        for number, text in enumerate(samples(list(added), _MIN_PIECES_CHARS)):
            special = number % 2 == 1
            ids = found.encode(text, add_special_tokens=special, learns_all=True)
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            if ids is not None and ids.tolist() != expected:
                log.warning("words have other ids than their text, and are not cached: %r", text)
                return None
        return found

    def with_aliases(
        self, tokenizer: Tokenizer, added: Mapping[str, int], control_ids: Iterable[int]
    ) -> WordIds:
        """Return words with the same caches for a tokenizer that differs in its added tokens alone.

        Args:
            tokenizer: knows `added` as added tokens, and no others.
            added: ids of added tokens, by what stands for them in a text.
            control_ids: those of `added` that other text must not be encoded as. The library has to
                encode a text where it would be.
        """
        words = copy(self)
        words._tokenizer = tokenizer
        words._set_added(added)
        words._control_ids = frozenset(control_ids)
        return words

    def _set_added(self, added: Mapping[str, int]) -> None:
        self._cut_added = re.compile(f"({any_of(added)})").split if added else None
        self._added = {token: array("i", [token_id]).tobytes() for token, token_id in added.items()}

    def blocks(self, text: str) -> Iterator[str]:
        """Cut a text at lone spaces into blocks whose ids, joined, are the ids of the text.

        A block is longer than `MAX_BLOCK_CHARS` only where the text cannot be cut.
        """
        start = 0
        while len(text) - start > MAX_BLOCK_CHARS:
            end = self._block_end(text, start, start + _BLOCK_CHARS)
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def encode(
        self, text: str, *, add_special_tokens: bool, learns_all: bool = False
    ) -> array[int] | None:
        """Return the ids of a text; None where the library has to encode it.

        The library has to if the text is longer than a block, or if too many of its characters are
        those of new words or not in the alphabet. With `learns_all` new words are cached, however
        many.
        """
        if len(text) > MAX_BLOCK_CHARS:
            return None
        parts = self._cut_added(text) if self._cut_added else [text]
        if len(parts) > _MAX_PARTS:
            return None
        plain = text.isascii() or self._is_plain(text) is not None
        found: list[Ids] = []
        for number, part in enumerate(parts):
            ids: list[Ids] | None
            if not part:
                continue
            if number % 2:
                ids = [self._added[part]]
            elif self._starts_piece is None or len(part) < _MIN_PIECES_CHARS:
                ids = self._ids_of([part], len(part), plain=plain, learns_all=learns_all)
            else:
                ids = self._ids_of_pieces(part, plain=plain, learns_all=learns_all)
            if ids is None:
                return None
            if self._control_ids and number % 2 == 0:
                ids = [b"".join(ids)]
                if not self._control_ids.isdisjoint(array("i", ids[0])):
                    return None
            found += ids
        joined = array("i", b"".join(found))
        return self.opening + joined if add_special_tokens else joined

    def _block_end(self, text: str, start: int, end: int) -> int:
        """Return the index of the last lone space before `end`, else of the first behind it."""
        if not self._has_blocks:
            return len(text)
        space = end
        for _ in range(_MAX_EDGE_SEARCHES):
            space = text.rfind(" ", start + 1, space)
            if space < 0:
                break
            if self._is_lone(text, space):
                return space
        space = text.find(" ", end)
        while space >= 0 and not self._is_lone(text, space):
            space = text.find(" ", space + 1)
        return space if space >= 0 else len(text)

    def _is_lone(self, text: str, space: int) -> bool:
        assert self._starts_piece is not None
        return not text[space - 1].isspace() and self._starts_piece(text, space + 1) is not None

    def _ids_of_pieces(self, text: str, *, plain: bool, learns_all: bool) -> list[Ids] | None:
        """Return the ids of a text by its pieces, in order."""
        pieces = text.split(" ")
        if not learns_all and self._has_new_words(pieces, len(text)):
            return None
        found: list[Ids | None] = [*map(self._pieces.newer.get, pieces)]
        # No space stands before the first.
        found[0] = None if pieces[0] else b""
        missing = [index for index, ids in enumerate(found) if ids is None]
        if not missing:
            return cast("list[Ids]", found)
        spans, indices = self._spans(pieces, missing)
        known, new = self._pieces.find([pieces[index] for index in indices])
        texts = [f" {piece}" for piece in new]
        texts += [" " * (first > 0) + " ".join(pieces[first : last + 1]) for first, last in spans]
        ids_of = self._ids_of(texts, len(text), plain=plain, learns_all=learns_all)
        if ids_of is None:
            return None
        learned = dict(zip(new, ids_of, strict=False))
        self._pieces.add(learned)
        known |= learned
        for index in indices:
            found[index] = known[pieces[index]]
        for (first, last), ids in zip(spans, ids_of[len(new) :], strict=True):
            found[first : last + 1] = [ids, *[b""] * (last - first)]
        return cast("list[Ids]", found)

    def _spans(
        self, pieces: list[str], missing: list[int]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Return what is not between two lone spaces, and the other indices of `missing`.

        The former are the first and last indices of pieces that have to be encoded together.
        """
        assert self._starts_piece is not None
        spans: list[tuple[int, int]] = []
        indices: list[int] = []
        for index in missing:
            piece = pieces[index]
            starts = index == 0 or self._starts_piece(piece) is not None
            ends = piece != "" and not piece[-1].isspace()
            if starts and ends and index:
                indices.append(index)
                continue
            first, last = index - (not starts), min(index + (not ends), len(pieces) - 1)
            if spans and first <= spans[-1][1]:
                first, _ = spans.pop()
            spans.append((first, last))
        covered = {index for first, last in spans for index in range(first, last + 1)}
        return spans, [index for index in indices if index not in covered]

    def _has_new_words(self, pieces: list[str], chars: int) -> bool:
        """Return True if most words of a sample are new. Some of them are cached then."""
        stride = 1 + len(pieces) // _SAMPLE_PIECES
        # From elsewhere each time: what has been cached of the same text says nothing of the rest.
        self._sampled += 1
        sample = pieces[self._sampled % stride :: stride]
        if 2 * sum(map(self._pieces.newer.__contains__, sample)) >= len(sample):
            return False
        text = " ".join(sample)
        if not self._is_plain(text):
            return False
        _, new = self._words.find(self._cut_words(text))
        if sum(map(len, new)) <= _MAX_NEW_SHARE * len(text):
            return False
        self._learn(new, chars)
        return True

    def _ids_of(
        self, texts: list[str], chars: int, *, plain: bool, learns_all: bool
    ) -> list[Ids] | None:
        """Return the ids of each text; None if too many of the `chars` characters are new."""
        most = max(_MIN_NEW_CHARS, _MAX_NEW_SHARE * chars)
        words_of = [self._cut_words(t) if plain or self._is_plain(t) else None for t in texts]
        new_chars = 0
        if not plain:
            foreign = [len(t) for t, words in zip(texts, words_of, strict=True) if words is None]
            # The library takes 20 us more for each text.
            new_chars = sum(foreign) + 16 * len(foreign)
            if new_chars > most:
                return None
        known, new = self._words.find([word for words in words_of if words for word in words])
        if not learns_all and new_chars + sum(map(len, new)) > most:
            self._learn(new, chars)
            return None
        learned = {word: self._ids_of_word(word) for word in new}
        self._words.add(learned)
        known |= learned
        return [
            self._ask_library(text) if words is None else b"".join([known[w] for w in words])
            for text, words in zip(texts, words_of, strict=True)
        ]

    def _learn(self, words: list[str], chars: int) -> None:
        """Cache the first of some new words of a text of so many characters.

        Without them a gateway that was just started would never know any word.
        """
        left = _LEARNED_SHARE * chars
        learned: dict[str, Ids] = {}
        for word in words:
            learned[word] = self._ids_of_word(word)
            left -= len(word)
            if left < 0:
                break
        self._words.add(learned)

    def _ids_of_word(self, word: str) -> Ids:
        written = word.encode().decode("latin-1").translate(_CHARACTER_OF)
        return array("i", [token.id for token in self._tokenize_word(written)]).tobytes()

    def _ask_library(self, text: str) -> Ids:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("i", encoding.ids).tobytes()


def _added(definition: dict[str, Any]) -> dict[str, int] | None:
    """Return the added tokens; None if one search does not find each wherever its text is."""
    tokens = definition["added_tokens"]
    strange = any(t["single_word"] or t["lstrip"] or t["rstrip"] for t in tokens)
    long = any(len(t["content"]) > _MAX_ADDED_CHARS for t in tokens)
    if strange or long or len({t["normalized"] for t in tokens}) > 1:
        return None
    if definition["normalizer"] is not None and any(t["normalized"] for t in tokens):
        return None
    return {t["content"]: t["id"] for t in tokens}
