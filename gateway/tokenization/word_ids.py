"""Token ids of a text from the cached ids of its words.

A byte-level BPE tokenizer splits a text at its added tokens, then into words by a regular
expression, and merges only within words. The ids of a text are therefore the joined ids of its
words, and most words of a text occur many times. This module splits a text with the same regular
expression, which `word_pattern` translates for Python's `re`. It asks the Rust library `tokenizers`
only once for the ids of each word. In this package, "the library" means this Rust library. The
library itself encodes texts of mostly new words, and all texts if the tokenizer is of another type.

A space is lone if no other white space is beside it. Some tokenizers (GPT-2, GPT-4o, Llama 3, Qwen)
begin a word at each lone space. For these tokenizers, the text between two lone spaces is called a
piece. The ids of each piece are cached as well. A long text is split at lone spaces into blocks of
several thousand characters, which are encoded separately.

See decision 043 in docs/decisions.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any, cast

from tokenizers import Tokenizer

from gateway.tokenization.control_tokens import build_alternation
from gateway.tokenization.lone_spaces import MAX_BLOCK_CHARS, LoneSpaces
from gateway.tokenization.vocabulary import BYTE_OF
from gateway.tokenization.word_cache import Ids, WordCache
from gateway.tokenization.word_pattern import (
    ALPHABET,
    char_class,
    pattern_of,
    piece_start_of,
    translate_pattern,
)
from gateway.tokenization.word_samples import make_samples

log = logging.getLogger(__name__)

_MAX_WORDS, _MAX_PIECES = 16_384, 32_768
# Minimum length of a text that is split into pieces at lone spaces. A shorter text is split into
# words, which takes less CPU.
_MIN_PIECES_CHARS = 100
# Maximum fraction of a text's characters that may be in new words: words whose ids are not cached.
# If a text exceeds this fraction, the library encodes the text, and only a few of its new words are
# cached. Caching all new words would take up to twice as much CPU as the library.
_MAX_NEW_SHARE = 0.3
_MIN_NEW_CHARS = 128
_LEARNED_SHARE = 1 / 64
_SAMPLE_PIECES = 32
# Maximum number of parts into which added tokens may split a text. Each part takes 3 us of CPU, in
# addition to the time for its words.
_MAX_PARTS = 512
# Maximum length of an added token. A longer token would nest the regular expression too deeply.
_MAX_ADDED_CHARS = 64

_CHARACTER_OF = {byte: char for char, byte in BYTE_OF.items()}


class WordIds:
    """Encoder of texts for one tokenizer, with a cache of the token ids of words.

    Use an instance in one thread only.
    """

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
        # Ids of control tokens. If the joined ids of a text contain one of them, the library
        # encodes the text.
        self._control_ids: frozenset[int] = frozenset()
        self._lone_spaces = None if piece_start is None else LoneSpaces(piece_start)
        # False if an added token contains a space: a block could then end within that token.
        self._has_blocks = not any(" " in token for token in added)
        self._words = WordCache(_MAX_WORDS)
        # Ids by piece. The ids include the space before the piece, but the key does not.
        self._pieces = WordCache(_MAX_PIECES)
        self._sampled = 0
        self._tokenizer = tokenizer
        self._tokenize_word = tokenizer.model.tokenize
        self.opening = array("i", tokenizer.encode("").ids)
        """Ids of the special tokens that the tokenizer puts before a text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: dict[str, Any]) -> WordIds | None:
        """Return the encoder for a tokenizer, or None if words cannot be encoded separately.

        Only some byte-level BPE tokenizers encode words separately. As a check, the method encodes
        sample texts, and returns None if the library encodes one of them differently. `definition`
        is the content of tokenizer.json; the vocabulary may be missing.
        """
        pattern, added = pattern_of(definition), _read_added_tokens(definition)
        words = None if pattern is None else translate_pattern(pattern)
        if (
            pattern is None
            or words is None
            or added is None
            or tokenizer.truncation
            or tokenizer.padding
        ):
            return None
        found = cls(tokenizer, words, piece_start_of(pattern), added)
        # Encode every second sample text with special tokens.
        for number, text in enumerate(make_samples(list(added), _MIN_PIECES_CHARS)):
            special = number % 2 == 1
            ids = found.encode(text, add_special_tokens=special, learns_all=True)
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            if ids is not None and ids.tolist() != expected:
                log.warning("words have other ids than their text, and are not cached: %r", text)
                return None
        return found

    def build_aliased(
        self, tokenizer: Tokenizer, added: Mapping[str, int], control_ids: Iterable[int]
    ) -> WordIds:
        """Return an encoder for `tokenizer`, which shares the word caches of this encoder.

        The arguments are attributes of `control_tokens.ControlTokens`, whose second tokenizer has
        aliases in place of the control tokens.

        Args:
            tokenizer: a tokenizer that differs from this encoder's tokenizer only in `added`.
            added: ids of all added tokens, by their text.
            control_ids: ids of the control tokens. If a text would have one of these ids, the
                library encodes the text.
        """
        words = copy(self)
        words._tokenizer = tokenizer
        words._set_added(added)
        words._control_ids = frozenset(control_ids)
        return words

    def _set_added(self, added: Mapping[str, int]) -> None:
        self._cut_added = re.compile(f"({build_alternation(added)})").split if added else None
        self._added = {token: array("i", [token_id]).tobytes() for token, token_id in added.items()}

    def cut_blocks(self, text: str) -> Iterable[str]:
        """Return the blocks of a text. The joined ids of the blocks are the ids of the text."""
        if self._lone_spaces is None or not self._has_blocks:
            return [text]
        return self._lone_spaces.cut_blocks(text)

    def encode(
        self, text: str, *, add_special_tokens: bool, learns_all: bool = False
    ) -> array[int] | None:
        """Return the ids of a text. Return None if the library must encode the text.

        Return None if the text has more than `MAX_BLOCK_CHARS` characters, too many added tokens,
        too many new words, or too many characters outside of `word_pattern.ALPHABET`. Also return
        None if the joined ids contain a control token. With `learns_all`, the number of new words
        is not limited, and all of them are cached.
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
                found.append(self._added[part])
                continue
            if self._lone_spaces is None or len(part) < _MIN_PIECES_CHARS:
                known = self._ids_of_known_words(part) if plain else None
                ids = (
                    [known]
                    if known is not None
                    else self._ids_of([part], len(part), plain=plain, learns_all=learns_all)
                )
            else:
                ids = self._ids_of_pieces(part, plain=plain, learns_all=learns_all)
            if ids is None:
                return None
            if self._control_ids:
                ids = [b"".join(ids)]
                if not self._control_ids.isdisjoint(array("i", ids[0])):
                    return None
            found += ids
        joined = array("i", b"".join(found))
        return self.opening + joined if add_special_tokens else joined

    def _ids_of_pieces(self, text: str, *, plain: bool, learns_all: bool) -> list[Ids] | None:
        """Return the ids of each piece of a text. Return None if too many words are not cached."""
        pieces = text.split(" ")
        if not learns_all and self._has_new_words(pieces, len(text)):
            return None
        found: list[Ids | None] = [*map(self._pieces.newer.get, pieces)]
        # Ignore the cached ids of the first piece, because they include a space before the piece.
        head = pieces[0]
        found[0] = None if head else b""
        if head and plain and len(pieces) > 1 and found[1] and not head[-1].isspace():
            found[0] = self._ids_of_known_words(head)
        missing = _indices_of_none(found)
        if not missing:
            return cast("list[Ids]", found)
        assert self._lone_spaces is not None
        spans, indices = self._lone_spaces.find_spans(pieces, missing)
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

    def _has_new_words(self, pieces: list[str], chars: int) -> bool:
        """Return True if too many words in a sample of the pieces are not cached.

        In this case, cache some of these words.
        """
        stride = 1 + len(pieces) // _SAMPLE_PIECES
        # Take every n-th piece as a sample, and begin each sample at a different piece. `_learn`
        # has cached words of earlier samples. If the same text comes again, the same sample would
        # hide that most other words of the text are not cached.
        self._sampled += 1
        sample = pieces[self._sampled % stride :: stride]
        if 2 * sum(map(self._pieces.newer.__contains__, sample)) >= len(sample):
            return False
        _, new_pieces = self._pieces.find(sample)
        text = " ".join(new_pieces)
        if 2 * len(new_pieces) <= len(sample) or not self._is_plain(text):
            return False
        _, new = self._words.find(self._cut_words(text))
        if sum(map(len, new)) <= _MAX_NEW_SHARE * sum(map(len, sample)):
            return False
        self._learn(new, chars)
        return True

    def _ids_of(
        self, texts: list[str], chars: int, *, plain: bool, learns_all: bool
    ) -> list[Ids] | None:
        """Return the ids of each of the texts. Return None if too many characters are in new words.

        `texts` are pieces of one text, which has `chars` characters. Only a fraction of these
        characters may be in new words.
        """
        found: list[Ids] = []
        # Indices of texts that may have new words, and indices of texts with characters outside of
        # the alphabet.
        rest: list[int] = []
        foreign: list[int] = []
        for place, text in enumerate(texts):
            ids = None
            if not plain and not self._is_plain(text):
                foreign.append(place)
            elif (ids := self._ids_of_known_words(text)) is None:
                rest.append(place)
            found.append(ids or b"")
        most = max(_MIN_NEW_CHARS, _MAX_NEW_SHARE * chars)
        # Count 16 more characters for each text, because each call of the library takes 20 us.
        new_chars = sum([len(texts[place]) + 16 for place in foreign])
        if new_chars > most:
            return None
        words_of = [self._cut_words(texts[place]) for place in rest]
        known, new = self._words.find([word for words in words_of for word in words])
        if not learns_all and new_chars + sum(map(len, new)) > most:
            self._learn(new, chars)
            return None
        learned = {word: self._ids_of_word(word) for word in new}
        self._words.add(learned)
        known |= learned
        for place, words in zip(rest, words_of, strict=True):
            found[place] = b"".join([known[word] for word in words])
        for place in foreign:
            found[place] = self._ask_library(texts[place])
        return found

    def _learn(self, words: list[str], chars: int) -> None:
        """Cache the first few new words of a text with `chars` characters.

        Callers use this for a text with too many new words, which the library encodes. If such
        texts added nothing to the cache, the empty cache of a new process would never be filled.
        """
        left = _LEARNED_SHARE * chars
        learned: dict[str, Ids] = {}
        for word in words:
            learned[word] = self._ids_of_word(word)
            left -= len(word)
            if left < 0:
                break
        self._words.add(learned)

    def _ids_of_known_words(self, text: str) -> Ids | None:
        """Return the ids of a text if all its words are in the newer generation of the word cache.

        Otherwise, return None. All characters of the text must be in the alphabet.
        """
        known = self._words.newer
        try:
            return b"".join([known[word] for word in self._cut_words(text)])
        except KeyError:
            return None

    def _ids_of_word(self, word: str) -> Ids:
        written = word.encode().decode("latin-1").translate(_CHARACTER_OF)
        return array("i", [token.id for token in self._tokenize_word(written)]).tobytes()

    def _ask_library(self, text: str) -> Ids:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("i", encoding.ids).tobytes()


def _indices_of_none(found: list[Ids | None]) -> list[int]:
    """Return the indices of None in a list. If there are few, `index` is faster than a loop."""
    indices: list[int] = []
    with suppress(ValueError):
        while True:
            indices.append(found.index(None, indices[-1] + 1 if indices else 0))
    return indices


def _read_added_tokens(definition: dict[str, Any]) -> dict[str, int] | None:
    """Return the ids of added tokens, by text.

    `WordIds` finds added tokens by a plain search for their texts. Return None if the tokenizer has
    added tokens that a plain search does not handle: for example, some also remove the white space
    beside them. Also return None if an added token is too long.
    """
    tokens = definition["added_tokens"]
    strange = any(t["single_word"] or t["lstrip"] or t["rstrip"] for t in tokens)
    long = any(len(t["content"]) > _MAX_ADDED_CHARS for t in tokens)
    if strange or long or len({t["normalized"] for t in tokens}) > 1:
        return None
    if definition["normalizer"] is not None and any(t["normalized"] for t in tokens):
        return None
    return {t["content"]: t["id"] for t in tokens}
