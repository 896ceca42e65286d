"""Converter of grammars from xgrammar's EBNF to llguidance's variant of Lark.

The EBNF is xgrammar's dialect: llama.cpp's GBNF with more escapes, and with line breaks anywhere.
It has rules ``name ::= ...`` with the start rule ``root``, ``"strings"``, ``[classes]``, ``|``,
groups and ``? * + {n} {n,m} {n,}``. Its macros (``TagDispatch``, ``Token`` and similar) are
refused.

llguidance takes the longest match for each terminal, which can exclude texts that the grammar
allows. This converter therefore makes each character a separate terminal. A terminal of one
character can match in one way only, so the result allows the same texts as the EBNF. llguidance has
a converter, too, but it makes each string one terminal: ``[a-z]* "end"`` then does not match
``endend``. It also supports fewer escapes and line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DEPTH = 100
# Maximum length of a grammar in characters. llguidance accepts 65,000 symbols, and each character
# in a string or class becomes a symbol.
MAX_LENGTH = 200_000
MAX_COUNT_DIGITS = 9
MAX_CODE_POINT = 0x10FFFF

_TOKEN = re.compile(
    r"""
      (?P<space>   (?: \s | \#[^\n]* )+ )
    | (?P<macro>   (?: TagDispatch | TokenTagDispatch | Token | ExcludeToken ) (?= \s* \( ) )
    | (?P<name>    [A-Za-z_][A-Za-z0-9_.-]* )
    | (?P<defines> ::= )
    | (?P<string>  " (?: [^"\\\n] | \\. )* " )
    | (?P<class>   \[ (?: [^\]\\\n] | \\. )* \] )
    | (?P<times>   \{ \s* \d+ \s* (?: , \s* \d* \s* )? \} )
    | (?P<sign>    [|()?*+] )
    """,
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]+) | \\u(?P<u>[0-9A-Fa-f]{4}) | \\U(?P<U>[0-9A-Fa-f]{8})"
    r"| \\(?P<escaped>.) | (?P<plain>.)",
    re.VERBOSE | re.DOTALL,
)
_CONTROLS = dict(zip("nrtbfav0e", "\n\r\t\b\f\a\v\0\x1b", strict=True))
_LITERAL_ESCAPES = "\"'\\/?"
_CLASS_ESCAPES = _LITERAL_ESCAPES + "^$.*+()[]{}|-"


# Kinds that `parts_of` yields for the tokens that group or separate other tokens.
_SIGNS = {"(": "open", ")": "close", "|": "or"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


def to_lark(ebnf: str) -> str:
    """Return the EBNF grammar, converted to llguidance's Lark.

    Raise ValueError, with line and column, for invalid EBNF.
    """
    return _Converter(ebnf).convert()


def parts_of(ebnf: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens of a grammar in the order of the text, each as (kind, text).

    Kinds are ``open``, ``close``, ``or``, ``sign`` (``?``, ``*``, ``+``), ``times`` (a counted
    repetition), ``string``, ``class``, ``name`` and ``defines``. Raise ValueError for any other
    token.
    """
    for token in _Converter(ebnf).tokens[:-1]:
        yield _SIGNS.get(token.text, token.kind), token.text


class _Converter:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise ValueError(
                f"EBNF error: found {len(text)} characters, allowed at most {MAX_LENGTH}"
            )
        self._text = text
        self.tokens = self._split()
        self._next = 0
        self._names: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._references: dict[str, _Token] = {}

    def convert(self) -> str:
        while self._peek().kind != "end":
            name = self._take()
            if name.kind != "name" or self._take().kind != "defines":
                raise self._error("expected `name ::=`", name)
            if name.text in self._bodies:
                raise self._error(f'rule "{name.text}" is defined twice', name)
            self._bodies[name.text] = self._alternatives(0)
            if (token := self._peek()).kind not in ("name", "end"):
                raise self._error(f"unexpected {token.text}", token)
        for reference in self._references.values():
            if reference.text not in self._bodies:
                raise self._error(f'rule "{reference.text}" is not defined', reference)
        if "root" not in self._bodies:
            raise ValueError('EBNF error: there is no rule "root"')
        rules = [f"{self._name(name)}: {body}" for name, body in self._bodies.items()]
        return "\n".join([f"start: {self._name('root')}", *rules])

    def _split(self) -> list[_Token]:
        tokens = []
        start = 0
        while start < len(self._text):
            match = _TOKEN.match(self._text, start)
            if match is None:
                found = _Token("", self._text[start], start)
                raise self._error(f"unexpected {found.text!r}", found)
            assert match.lastgroup is not None
            if match.lastgroup == "macro":
                macro = _Token("macro", match.group(), start)
                raise self._error(f"the macro {macro.text} is not supported", macro)
            if match.lastgroup != "space":
                tokens.append(_Token(match.lastgroup, match.group(), start))
            start = match.end()
        return [*tokens, _Token("end", "end of the grammar", start)]

    def _peek(self, ahead: int = 0) -> _Token:
        return self.tokens[min(self._next + ahead, len(self.tokens) - 1)]

    def _take(self) -> _Token:
        token = self._peek()
        self._next += 1
        return token

    def _error(self, what: str, token: _Token) -> ValueError:
        before = self._text[: token.start]
        line, column = before.count("\n") + 1, token.start - before.rfind("\n")
        return ValueError(f"EBNF error at line {line}, column {column}: {what}")

    def _name(self, name: str) -> str:
        # Rename all rules: in Lark, upper and lower case distinguish terminals and rules, and some
        # names are reserved.
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep", self._peek())
        branches = [self._sequence(depth)]
        while self._peek().text == "|":
            self._take()
            branches.append(self._sequence(depth))
        return " | ".join(branches)

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while (token := self._peek()).kind != "end" and token.text not in ("|", ")"):
            # End the rule at the next definition, not at a line break: a rule may have several
            # lines.
            if token.kind == "name" and self._peek(1).kind == "defines":
                break
            parts.append(self._repeated(self._element(depth)))
        return " ".join(parts) or '""'

    def _element(self, depth: int) -> str:
        token = self._take()
        if token.kind == "name":
            self._references.setdefault(token.text, token)
            return self._name(token.text)
        if token.kind == "string":
            characters = self._characters(token, _LITERAL_ESCAPES)
            return " ".join(_terminal([(code, code)]) for code, _ in characters) or '""'
        if token.kind == "class":
            return self._class(token)
        if token.text == "(":
            inner = self._alternatives(depth + 1)
            if self._take().text != ")":
                raise self._error("this group is not closed", token)
            return f"({inner})"
        raise self._error(f"unexpected {token.text}", token)

    def _repeated(self, element: str) -> str:
        token = self._peek()
        if token.kind != "times" and token.text not in ("?", "*", "+"):
            return element
        self._take()
        if token.kind != "times":
            return f"({element}){token.text}"
        bounds = re.findall(r"\d+", token.text)
        if max(map(len, bounds)) > MAX_COUNT_DIGITS:
            raise self._error(f"a count has more than {MAX_COUNT_DIGITS} digits", token)
        least, most = int(bounds[0]), bounds[-1]
        if len(bounds) == 1 and "," in token.text:
            return f"({element}){{{least},}}"
        if int(most) < least:
            raise self._error(f"{token.text}: the upper bound is below the lower one", token)
        # Return the empty text for {0}, because Lark has no repetition of zero times.
        return f"({element}){{{least},{int(most)}}}" if int(most) else '""'

    def _class(self, token: _Token) -> str:
        characters = self._characters(token, _CLASS_ESCAPES)
        negated = characters[:1] == [(ord("^"), False)]
        if negated:
            characters = characters[1:]
        ranges = []
        characters.reverse()  # reverse the list, because removing from its end takes constant time
        while characters:
            first = last = characters.pop()[0]
            if len(characters) > 1 and characters[-1] == (ord("-"), False):
                last = characters[-2][0]
                del characters[-2:]
            if last < first:
                raise self._error(f"{token.text}: a range ends before it begins", token)
            ranges.append((first, last))
        if not ranges and not negated:
            raise self._error("[] matches nothing", token)
        return _terminal(ranges, negated=negated)

    def _characters(self, token: _Token, escapes: str) -> list[tuple[int, bool]]:
        """Return (code point, is_escaped) of each character between the delimiters.

        `is_escaped` is True for a character that is written as an escape sequence.
        """
        found = []
        for match in _CHARACTER.finditer(token.text[1:-1]):
            plain, escaped = match["plain"], match["escaped"]
            if plain is not None:
                code = ord(plain)
            elif escaped is None:
                code = int(match["x"] or match["u"] or match["U"], 16)
            elif escaped in _CONTROLS:
                code = ord(_CONTROLS[escaped])
            elif escaped in escapes:
                code = ord(escaped)
            else:
                raise self._error(f"unknown escape {match.group()} in {token.text}", token)
            if plain == "\0" or code > MAX_CODE_POINT or 0xD800 <= code < 0xE000:
                raise self._error(f"{match.group()} is not a character", token)
            found.append((code, plain is None))
        return found


def _terminal(ranges: list[tuple[int, int]], *, negated: bool = False) -> str:
    """Return a Lark terminal that matches one character in `ranges` or, if `negated`, outside them.

    Code points are written as numbers, which need no escapes.
    """
    if not ranges:
        return "/(?s:.)/"
    body = "".join(
        rf"\x{{{first:x}}}" + (rf"-\x{{{last:x}}}" if last > first else "")
        for first, last in ranges
    )
    return f"/[{'^' if negated else ''}{body}]/"
