"""Translation of the regular expression with which a byte-level BPE splits a text into words.

tokenizer.json has the expression in the syntax of Oniguruma, and the translation is for Python's
`re`. Both match the same words in texts of a small alphabet. Each character class is replaced by
its members in this alphabet, according to the tokenizers library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, pre_tokenizers

# ASCII, Latin-1 and typographic punctuation. NFC changes none of these characters. The alphabet has
# no characters that equal an ASCII letter if case is ignored, such as the long s.
ALPHABET = "".join(map(chr, [*range(0x80), *range(0xA0, 0x100), *range(0x2010, 0x2028)]))
# The default expression of the pre-tokenizer `ByteLevel`. Source: GPT-2's encoder.py.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Syntax that means the same in Oniguruma and Python. Flags are excluded. `{2}+` is excluded because
# it is possessive in Python only. A case-insensitive "ss" is excluded because it matches "ß" in
# Oniguruma only.
_SYNTAX = re.compile(
    r"(?P<chars>\\p\{[A-Z][a-z]?\}|\\[sS])|(?P<open>\[\^?(?!\]))|(?P<close>\])"
    r"|\\[rntfv\\.?*+|/()\[\]{}^$-]|[^\\\[\]&~#^$({]"
    r"|\(\?(?:i:(?![^)]*s\]?\[?s)[][a-z'|]*\)|!|=|:)|\{\d+(?:,\d*)?\}(?![?*+])"
    r"|(?P<literal>[({])"
)
# Replaces a character class without members in the alphabet. This character never occurs in a text
# of the alphabet, so the class never matches.
_NO_CHARACTER = "\ue000"

# The next four constants match parts of an expression. `_FIRST` matches an expression for the first
# character of a word, which may be a space. `_SOLID` matches an expression for further characters,
# which are no spaces.
_FIRST = r"(?: |\[\^(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\])\??"
_SOLID = (
    r"(?:\\p\{[LMNPS][a-z]?\}|\[(?:\\p\{[LMNPS][a-z]?\}|\\[rn]|/)+\]"
    r"|\[\^\\s(?:\\p\{[A-Z][a-z]?\}|\\[rn])*\]|[a-z']|\(\?i:(?:[a-z'|]|\[[a-z']+\])*\))"
    r"(?:[?*+]|\{\d+(?:,\d*)?\})?"
)
# Matches an expression for white space.
_WHITE = r"\\s[*+]?(?:\[\\r\\n\][*+]?|\(\?!\\S\))?"
# Matches an expression of the demo's tokenizer: a comma with the space before a number.
_NUMBER = r", \(\?=\\p\{N\}\)"
# Matches expressions that begin a word at each lone space. The expression of the demo's tokenizer
# matches, too, although it begins no word at a lone space between a comma and a number.
_PIECES = re.compile(rf"(?:(?:(?:{_FIRST})?(?:{_SOLID})+|{_WHITE}|(?P<number>{_NUMBER}))\|)+\\s\+")


def pattern_of(definition: dict[str, Any]) -> str | None:
    """Return the expression with which a byte-level BPE splits a text into words.

    Return None if the tokenizer is no byte-level BPE with a single expression. `definition` is the
    content of tokenizer.json.
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
    """Return an expression for Python that matches the same words in texts of the alphabet.

    Return None if the expression contains syntax that cannot be translated safely.
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
    # Refuse an expression that may match an empty string, because Oniguruma and Python continue
    # differently after an empty match. All lookaheads are optional in this check.
    with_all_lookaheads = re.sub(r"\(\?[!=]", "(?:|", found)
    try:
        if re.compile(with_all_lookaheads).fullmatch(""):
            return None
        # Also match the text between two words: the tokenizer treats it as a word, too.
        return re.compile(rf"{found}|(?s:.)+?(?={found}|\Z)")
    except re.error:
        return None


def _members(chars: str) -> str:
    """Return the characters of the alphabet that the library finds in a character class."""
    others = pre_tokenizers.Split(Regex(chars), "removed").pre_tokenize_str
    return "".join(char for char in ALPHABET if not others(char))


def char_class(chars: Iterable[str]) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in chars)


def piece_start_of(pattern: str) -> re.Pattern[str] | None:
    """Return a pattern for the text after a lone space. If it matches, the space begins a word.

    A space is lone if no other white space is beside it. Return None if `_PIECES` does not match
    the expression `pattern`, whose words may then contain lone spaces.
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
