"""Translation of the regular expression with which a byte-level BPE splits a text into words.

tokenizer.json has the regular expression in the syntax of Oniguruma. The translation is for
Python's `re`. In texts of the small alphabet `ALPHABET`, both expressions match the same words. The
translation replaces each character class by its members in this alphabet. The Rust library
tokenizers determines these members.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, pre_tokenizers

# ASCII, Latin-1 from U+00A0 on, and typographic punctuation. NFC normalization changes none of
# these characters. The long s and similar characters are left out, because they equal an ASCII
# letter if case is ignored.
ALPHABET = "".join(map(chr, [*range(0x80), *range(0xA0, 0x100), *range(0x2010, 0x2028)]))
# The default regular expression of the pre-tokenizer `ByteLevel`. Source: GPT-2's encoder.py.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Matches one element of a regular expression if the element means the same in Oniguruma and Python,
# or is a character class that can be translated. Examples of elements that are not matched: flags
# such as `(?i)`; `{2}+`, which is a possessive quantifier only in Python; a case-insensitive "ss",
# which matches "ß" only in Oniguruma.
_SYNTAX = re.compile(
    r"(?P<chars>\\p\{[A-Z][a-z]?\}|\\[sS])|(?P<open>\[\^?(?!\]))|(?P<close>\])"
    r"|\\[rntfv\\.?*+|/()\[\]{}^$-]|[^\\\[\]&~#^$({]"
    r"|\(\?(?:i:(?![^)]*s\]?\[?s)[][a-z'|]*\)|!|=|:)|\{\d+(?:,\d*)?\}(?![?*+])"
    r"|(?P<literal>[({])"
)
# Character that replaces a character class without members in the alphabet. This character never
# occurs in a text of the alphabet, so the replaced class never matches.
_NO_CHARACTER = "\ue000"

# The following expressions match parts of a tokenizer's regular expression for words. `_FIRST`
# matches the part for the first character of a word, which may be a space. `_SOLID` matches the
# part for the other characters of the word, which are not white space.
_FIRST = r"(?: |\[\^(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\])\??"
_SOLID = (
    r"(?:\\p\{[LMNPS][a-z]?\}|\[(?:\\p\{[LMNPS][a-z]?\}|\\[rn]|/)+\]"
    r"|\[\^\\s(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\]|[a-z']|\(\?i:(?:[a-z'|]|\[[a-z']+\])*\))"
    r"(?:[?*+]|\{\d+(?:,\d*)?\})?"
)
# Matches the part for words of white space.
_WHITE = r"\\s[*+]?(?:\[\\r\\n\][*+]?|\(\?!\\S\))?"
# Matches a part that only the tokenizer of the demo model has: a comma and a space before a number.
_NUMBER = r", \(\?=\\p\{N\}\)"
# Matches the complete regular expression of a tokenizer that begins a word at each lone space. The
# demo model's expression is also matched, although no word begins at its lone spaces between a
# comma and a number.
_PIECES = re.compile(rf"(?:(?:(?:{_FIRST})?(?:{_SOLID})+|{_WHITE}|(?P<number>{_NUMBER}))\|)+\\s\+")


def pattern_of(definition: dict[str, Any]) -> str | None:
    """Return the regular expression with which a byte-level BPE splits a text into words.

    Return None if the tokenizer is no byte-level BPE with a single regular expression. `definition`
    is the content of tokenizer.json.
    """
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


def translate_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return a regular expression for Python that splits a text into the same words as `pattern`.

    The words are the same only for texts of characters in `ALPHABET`. Return None if `pattern`
    contains syntax that cannot be translated safely.
    """
    found, at, within = "", 0, False
    while at < len(pattern):
        step = _SYNTAX.match(pattern, at)
        if step is None or step["open" if within else "literal"]:
            return None
        at = step.end()
        if step["chars"]:
            chars = char_class(_members(step["chars"]) or _NO_CHARACTER)
            found += chars if within else f"[{chars}]"
        else:
            found += step[0]
            within = (within and not step["close"]) or bool(step["open"])
    # Refuse a regular expression that may match an empty string, because Oniguruma and Python
    # continue the search differently after an empty match. The check replaces each
    # lookahead by a group that can match an empty string.
    with_all_lookaheads = re.sub(r"\(\?[!=]", "(?:|", found)
    try:
        if re.compile(with_all_lookaheads).fullmatch(""):
            return None
        # Also match any text that `found` does not match: the tokenizer treats the text between two
        # matches as a word, too.
        return re.compile(rf"{found}|(?s:.)+?(?={found}|\Z)")
    except re.error:
        return None


def _members(chars: str) -> str:
    """Return the characters of the alphabet that the library finds in the class `chars`."""
    others = pre_tokenizers.Split(Regex(chars), "removed").pre_tokenize_str
    return "".join(char for char in ALPHABET if not others(char))


def char_class(chars: Iterable[str]) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in chars)


def piece_start_of(pattern: str) -> re.Pattern[str] | None:
    """Return a regular expression for the text after a lone space that begins a word.

    `pattern` is the tokenizer's regular expression for words. A space is lone if no other white
    space is beside it. Return None if `_PIECES` does not match `pattern`: words of this tokenizer
    may contain lone spaces.
    """
    found = _PIECES.fullmatch(pattern)
    if found is None:
        return None
    if not found["number"]:
        return re.compile(r"\S")
    numbers = _members(r"\p{N}")
    # Also exclude all characters outside the alphabet, because other scripts have numbers, too.
    return re.compile(
        f"[{char_class(c for c in ALPHABET if c not in numbers and not c.isspace())}]"
    )
