"""Translation of the expression by which a byte-level BPE cuts a text into words.

tokenizer.json has this regular expression in the syntax of Oniguruma; the translation is for
Python's `re`. Both mean the same for texts in a small alphabet: the library is asked which
characters of the alphabet are in each class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, pre_tokenizers

# ASCII, Latin-1 and typographic punctuation. NFC changes none of these characters. If case is
# ignored, no other character of the alphabet equals an ASCII letter (as the long s does).
ALPHABET = "".join(map(chr, [*range(0x80), *range(0xA0, 0x100), *range(0x2010, 0x2028)]))
# The expression that the pre-tokenizer `ByteLevel` has by default. Source: GPT-2's encoder.py.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Syntax with the same meaning for Oniguruma and Python. Excluded are flags, `{2}+`, which is
# possessive in Python only, and "ss" if case is ignored, which matches "ß" in Oniguruma only.
_SYNTAX = re.compile(
    r"(?P<chars>\\p\{[A-Z][a-z]?\}|\\[sS])|(?P<open>\[\^?(?!\]))|(?P<close>\])"
    r"|\\[rntfv\\.?*+|/()\[\]{}^$-]|[^\\\[\]&~#^$({]"
    r"|\(\?(?:i:(?![^)]*s\]?\[?s)[][a-z'|]*\)|!|=|:)|\{\d+(?:,\d*)?\}(?![?*+])"
    r"|(?P<literal>[({])"
)
# Stands for a class without characters of the alphabet. Not in the alphabet, so never matched.
_NO_CHARACTER = "\ue000"

# Parts of the expression for a word: the first character, which may be a space, and further
# characters, which are no spaces, ...
_FIRST = r"(?: |\[\^(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\])\??"
_SOLID = (
    r"(?:\\p\{[LMNPS][a-z]?\}|\[(?:\\p\{[LMNPS][a-z]?\}|\\[rn]|/)+\]"
    r"|\[\^\\s(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\]|[a-z']|\(\?i:(?:[a-z'|]|\[[a-z']+\])*\))"
    r"(?:[?*+]|\{\d+(?:,\d*)?\})?"
)
# ... white space alone, ...
_WHITE = r"\\s[*+]?(?:\[\\r\\n\][*+]?|\(\?!\\S\))?"
# ... and, in the demo's tokenizer, a comma with the space before a number.
_NUMBER = r", \(\?=\\p\{N\}\)"
# Expressions for which a word begins at each lone space, except before a number in the demo's.
_PIECES = re.compile(rf"(?:(?:(?:{_FIRST})?(?:{_SOLID})+|{_WHITE}|(?P<number>{_NUMBER}))\|)+\\s\+")


def pattern_of(definition: dict[str, Any]) -> str | None:
    """Return the expression that cuts a text into words; None if the tokenizer is no byte-level
    BPE with one such expression."""
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
    """Return an expression for Python with the same meaning in the alphabet; None if unsure."""
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
    # Refuse an expression that may match an empty word: Oniguruma and Python continue differently
    # after an empty match. For this check, all lookaheads are made optional.
    with_all_lookaheads = re.sub(r"\(\?[!=]", "(?:|", found)
    try:
        if re.compile(with_all_lookaheads).fullmatch(""):
            return None
        # Make a word of text between two matches, too, as the tokenizer does.
        return re.compile(rf"{found}|(?s:.)+?(?={found}|\Z)")
    except re.error:
        return None


def _members(chars: str) -> str:
    """Return the characters of the alphabet that are in this class, according to the library."""
    others = pre_tokenizers.Split(Regex(chars), "removed").pre_tokenize_str
    return "".join(char for char in ALPHABET if not others(char))


def char_class(chars: Iterable[str]) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in chars)


def piece_start_of(pattern: str) -> re.Pattern[str] | None:
    """Return the pattern of text after a lone space for which a word begins at that space.

    A space is lone if there is no other white space beside it. Return None for an expression that
    `_PIECES` does not match: its words may contain lone spaces.
    """
    found = _PIECES.fullmatch(pattern)
    if found is None:
        return None
    if not found["number"]:
        return re.compile(r"\S")
    numbers = _members(r"\p{N}")
    # Exclude characters outside the alphabet, too: other scripts also have numbers.
    return re.compile(
        f"[{char_class(c for c in ALPHABET if c not in numbers and not c.isspace())}]"
    )
