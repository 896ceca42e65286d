"""Token ids of short texts without the tokenizer: a text is cut into words whose ids are kept.

A byte-level BPE first cuts at its added tokens, then by a regular expression, and merges within
each piece alone. So the ids of a text are those of its pieces, and English repeats its own. Each
piece's ids come from the tokenizers library once; only the cutting is done here, by the same
expression for Python's `re`, in an alphabet so small that the library is asked about each of its
characters. All other texts, and all other kinds of tokenizers, are left to the library.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

from gateway.tokenization.control_tokens import any_of

log = logging.getLogger(__name__)

# ASCII, Latin-1 and typographic punctuation: none is changed by NFC, and none is equal to an ASCII
# letter but for its case (as the long s is).
_ALPHABET = "".join(map(chr, [*range(0x80), *range(0xA0, 0x100), *range(0x2010, 0x2028)]))
# That of `ByteLevel` itself: GPT-2's encoder.py.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What means the same in both languages. Not so: flags, `{2}+`, which is possessive in one of them
# alone, and "ss" where case does not matter, which is "ß" in the other.
_SYNTAX = re.compile(
    r"(?P<chars>\\p\{[A-Z][a-z]?\}|\\[sS])|(?P<open>\[\^?(?!\]))|(?P<close>\])"
    r"|\\[rntfv\\.?*+|/()\[\]{}^$-]|[^\\\[\]&~#^$({]"
    r"|\(\?(?:i:(?![^)]*s\]?\[?s)[][a-z'|]*\)|!|=|:)|\{\d+(?:,\d*)?\}(?![?*+])"
    r"|(?P<literal>[({])"
)
# Is in no text that is cut here: stands where a class has no character of the alphabet, and
# between words. (The library takes a list of words, too; it loads numpy, 20 MiB, to look at it.)
_NONE = "\ue000"
# Words: each takes 500 bytes at most, as longer ones and those of more ids are not kept.
_ROOM = 16_384
_LONGEST = 64
_MOST_IDS = 8
_SAMPLES = 400


class WordIds:
    """Knows one tokenizer's words. `of` makes them."""

    def __init__(self, tokenizer: Tokenizer, words: re.Pattern[str], added: dict[str, int]) -> None:
        self._words = words.findall
        self._plain = re.compile(f"[{_class(_ALPHABET)}]*").fullmatch
        self._cut = re.compile(f"({any_of(added)})").split if added else None
        self._added = {token: (token_id,) for token, token_id in added.items()}
        self._known: dict[str, tuple[int, ...]] = dict(self._added)
        self._alone = Tokenizer(tokenizer.model)
        each = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        between = pre_tokenizers.Split(_NONE, "removed")
        self._alone.pre_tokenizer = pre_tokenizers.Sequence([between, each])
        self._before: list[int] = tokenizer.encode("").ids

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: dict[str, Any]) -> WordIds | None:
        """None for a tokenizer of another kind, and for one that was found to differ.

        `definition` is the tokenizer's JSON, which may lack the vocabulary.
        """
        pattern, added = _pattern(definition), _added(definition)
        words = None if pattern is None else _translated(pattern)
        if words is None or added is None or tokenizer.truncation or tokenizer.padding:
            return None
        found = cls(tokenizer, words, added)
        # What goes before a text does not depend on it: with it for one, without it for the next.
        for number, text in enumerate(_samples(list(added))):
            special = number % 2 == 1
            ids = found.encode(text, add_special_tokens=special)
            meant = tokenizer.encode(text, add_special_tokens=special).ids
            if ids is not None and ids != meant:
                log.warning("words have other ids than their text, and are not kept: %r", text)
                return None
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """None where the library has to do it."""
        words: list[str] = []
        ascii_alone = text.isascii()
        for place, part in enumerate(self._cut(text) if self._cut else (text,)):
            if place % 2:
                words.append(part)
            elif ascii_alone or self._plain(part):
                words += self._words(part)
            else:
                return None
        ids = self._before.copy() if add_special_tokens else []
        known = self._known
        try:
            for word in words:
                ids += known[word]
        except KeyError:
            return [*(self._before if add_special_tokens else ()), *self._learned(words)]
        return ids

    def _learned(self, words: list[str]) -> list[int]:
        # Never emptied, but replaced: another thread may be at it.
        known = self._known
        new = [word for word in dict.fromkeys(words) if word not in known]
        of_new: list[list[int]] = [[] for _ in new]
        encoding = self._alone.encode(_NONE.join(new))
        for place, token_id in zip(encoding.word_ids, encoding.ids, strict=True):
            assert place is not None  # as for special tokens, of which it has none
            of_new[place].append(token_id)
        found = {word: tuple(ids) for word, ids in zip(new, of_new, strict=True)}
        kept = {
            word: ids
            for word, ids in found.items()
            if len(word) <= _LONGEST and len(ids) <= _MOST_IDS
        }
        if len(known) + len(kept) > _ROOM + len(self._added):
            self._known = dict(self._added)
        self._known.update(kept)
        ids: list[int] = []
        for word in words:
            ids += known[word] if word in known else found[word]
        return ids


def _pattern(definition: dict[str, Any]) -> str | None:
    """The expression that cuts a text into words; None for other kinds of tokenizers."""
    model, normalizer = definition["model"], definition["normalizer"]
    plain = model["type"] == "BPE" and not any(
        model.get(name)
        for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    if not plain or (normalizer is not None and normalizer["type"] != "NFC"):
        return None
    steps = definition["pre_tokenizer"] or {"type": ""}
    match steps.get("pretokenizers", [steps]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [
            {
                "type": "Split",
                "pattern": {"Regex": str(p)},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return p
    return None


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


def _translated(pattern: str) -> re.Pattern[str] | None:
    """The same expression for Python, within the alphabet; None where that is not sure."""
    found, at, within = "", 0, False
    while at < len(pattern):
        step = _SYNTAX.match(pattern, at)
        if step is None or step["open" if within else "literal"]:
            return None
        at = step.end()
        if step["chars"]:
            chars = _class(_members(step["chars"]) or _NONE)
            found += chars if within else f"[{chars}]"
        else:
            found += step[0]
            within = (within and not step["close"]) or bool(step["open"])
    # The two go on differently after a word of no characters.
    with_all_lookaheads = re.sub(r"\(\?[!=]", "(?:|", found)
    try:
        if re.compile(with_all_lookaheads).fullmatch(""):
            return None
        # What lies between words is one, too.
        return re.compile(rf"{found}|(?s:.)+?(?={found}|\Z)")
    except re.error:
        return None


def _members(chars: str) -> str:
    """The characters of the alphabet that the library takes for such."""
    others = pre_tokenizers.Split(Regex(chars), "removed").pre_tokenize_str
    return "".join(char for char in _ALPHABET if not others(char))


def _class(chars: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in chars)


def _samples(tokens: list[str]) -> Iterator[str]:
    """Texts to compare by: the same at each start."""
    yield from (f"{char}a{char}1{char}{char} {char}" for char in _ALPHABET)
    kinds = ["a", "S", "é", "ª", "1", "²", " ", "\xa0", "\n", "\r", "\t", "'", "!", "/", "—"]
    yield from map("".join, product(kinds, kinds))
    draw = random.Random(0)
    more = [*kinds, "'s", "'LL", "the", " of", *draw.sample(tokens, min(8, len(tokens)))]
    for _ in range(_SAMPLES):
        yield "".join(draw.choices(more, k=draw.randint(3, 24)))
    for token in draw.sample(tokens, min(64, len(tokens))):
        yield f"a{token} {token[:-1]}{token}"
