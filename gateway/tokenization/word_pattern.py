"""The expression by which a byte-level BPE cuts a text into words, for Python's `re`.

tokenizer.json has it for Oniguruma. It means the same here within an alphabet so small that the
library is asked about each of its characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, pre_tokenizers

# ASCII, Latin-1 and typographic punctuation: none is changed by NFC, and none is equal to an ASCII
# letter but for its case (as the long s is).
ALPHABET = "".join(map(chr, [*range(0x80), *range(0xA0, 0x100), *range(0x2010, 0x2028)]))
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
# Stands where a class has no character of the alphabet.
_NO_CHARACTER = "\ue000"

# Of words: what begins one and may be a space, and steps that are none, ...
_FIRST = r"(?: |\[\^(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\])\??"
_SOLID = (
    r"(?:\\p\{[LMNPS][a-z]?\}|\[(?:\\p\{[LMNPS][a-z]?\}|\\[rn]|/)+\]"
    r"|\[\^\\s(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\]|[a-z']|\(\?i:(?:[a-z'|]|\[[a-z']+\])*\))"
    r"(?:[?*+]|\{\d+(?:,\d*)?\})?"
)
# ... of white space alone, ...
_WHITE = r"\\s[*+]?(?:\[\\r\\n\][*+]?|\(\?!\\S\))?"
# ... and the demo's own, of a comma and the space before a number.
_NUMBER = r", \(\?=\\p\{N\}\)"
_PIECES = re.compile(rf"(?:(?:(?:{_FIRST})?(?:{_SOLID})+|{_WHITE}|(?P<number>{_NUMBER}))\|)+\\s\+")


def pattern_of(definition: dict[str, Any]) -> str | None:
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


def translate_errors(pattern: str) -> re.Pattern[str] | None:
    """The same expression for Python, within the alphabet; None where that is not sure."""
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
    return "".join(char for char in ALPHABET if not others(char))


def char_class(chars: Iterable[str]) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in chars)


def piece_start_of(pattern: str) -> re.Pattern[str] | None:
    """Return what a word may begin with behind a lone space such that it begins at that space.

    A space is lone if there is no other white space beside it. Return None where the expression may
    have words that hold such a space within.
    """
    found = _PIECES.fullmatch(pattern)
    if found is None:
        return None
    if not found["number"]:
        return re.compile(r"\S")
    numbers = _members(r"\p{N}")
    # Other scripts have numbers, too.
    return re.compile(
        f"[{char_class(c for c in ALPHABET if c not in numbers and not c.isspace())}]"
    )
