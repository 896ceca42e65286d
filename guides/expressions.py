"""Rewriting of regular expressions to the subset that every release of xgrammar compiles.

Releases differ: 0.1.8 has no ``(?:`` groups, and releases up to 0.1.25 throw on an alternative that
is empty unless it is the last of a group. The rewritten expression matches the same texts: an empty
alternative becomes ``(...)?``, and each group a plain one. A guide matches a complete text, so
``^`` at its beginning and ``$`` at its end are empty, and refused elsewhere.

Releases up to 0.1.18 overflow the stack on a repetition of something that may be empty. The
rewritten repetition repeats only the non-empty texts, which gives the same language: ``(a?b*)+``
becomes ``(a|b)*``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# Splits every text in exactly one way, in linear time: an unclosed part extends to the end.
_EXPRESSION = re.compile(
    r"""
      (?P<escape> \\ (?s:.) | \\ \Z )
    | (?P<class>  \[ \^? \]? (?: [^\]\\] | \\ (?s:.) )* (?: \] | \\? \Z ) )
    | (?P<open>   \( (?: \? (?: : | P?<[^=!>]*>? )? )? )
    | (?P<close>  \) )
    | (?P<or>     \| )
    | (?P<times>  \{ \d+ (?: , \d* )? \} )
    | (?P<sign>   [*+?] )
    | (?P<part>   (?s:.) )
    """,
    re.VERBOSE,
)
_CLASS_PART = re.compile(r"\\.|\[|--|&&|~~", re.DOTALL)

MAX_DEPTH = 100

Part = tuple[str, str]
"""Kind and text of a part of an expression.

Kinds are ``open``, ``close``, ``or``, ``times``, ``sign``, ``class``, ``escape`` and ``part``.
"""


def parts_of(expression: str) -> Iterator[Part]:
    """Yield the parts of an expression in order."""
    for found in _EXPRESSION.finditer(expression):
        yield found.lastgroup or "", found.group()


@dataclass(slots=True)
class _Element:
    """A character, class or group, with its repetition. `empty` marks an element without text.

    `begins` marks an element with ``^``, which must be the first, and `ends` one with ``$``.
    `filled` is "" for an element that is never empty. For others it has non-empty alternatives that
    mean the same as the element when repeated.
    """

    text: str
    filled: str = ""
    empty: bool = False
    optional: bool = False
    repeated: bool = False
    begins: bool = False
    ends: bool = False

    def written(self) -> str:
        return f"{self.text}?" if self.optional else self.text


@dataclass(slots=True)
class _Group:
    alternatives: list[list[_Element]] = field(default_factory=lambda: [[]])

    def element(self) -> _Element:
        """Return the closed group."""
        elements = [element for each in self.alternatives for element in each]
        begins = any(element.begins for element in elements)
        ends = any(element.ends for element in elements)
        # Compilers have no anchors within a group; where anchors are allowed they are empty.
        full = [_without_anchors(each) for each in self.alternatives if not _is_empty(each)]
        if not full:
            return _Element("", empty=True, begins=begins, ends=ends)
        optional = len(full) < len(self.alternatives)
        filled = ""
        if optional or any(map(_may_be_empty, full)):
            filled = "|".join(dict.fromkeys(map(_filled, full)))
        text = "|".join(map(_written, full))
        return _Element(f"({text})", filled, optional=optional, begins=begins, ends=ends)

    def expression(self) -> str:
        """Return the group as a complete expression."""
        first, *others = self.alternatives
        if _is_empty(first) and not others:
            anchors = _written(first)
            # Releases crash on an expression without any element.
            return f"^(){anchors.removeprefix('^')}" if anchors.startswith("^") else f"(){anchors}"
        if any(map(_is_empty, self.alternatives)):
            # Compilers do not support an anchor within a group.
            bare = [_without_anchors(each) for each in self.alternatives]
            return _Group(bare).element().written() or "()"
        return "|".join(map(_written, self.alternatives))


_UNICODE = "Unicode classes are not supported; list the characters"
_UNKNOWN_ESCAPES = {"\\": "no character comes after it", "\\p": _UNICODE, "\\P": _UNICODE}


def to_xgrammar(expression: str) -> str:
    """Return the expression in a form that every release compiles.

    Raises ValueError for what xgrammar throws on and this cannot rewrite. An otherwise malformed
    expression is returned unchanged, for the compiler to refuse.
    """
    groups = [_Group()]
    for kind, text in parts_of(expression):
        current = groups[-1].alternatives[-1]
        if kind == "open":
            _check_open(text)
            if len(groups) > MAX_DEPTH:
                raise ValueError(f"groups are nested more than {MAX_DEPTH} deep")
            groups.append(_Group())
        elif kind == "close":
            if len(groups) == 1:
                return expression
            closed = groups.pop().element()
            _append(groups[-1].alternatives[-1], closed)
        elif kind == "or":
            groups[-1].alternatives.append([])
        elif kind in ("times", "sign"):
            if not current:
                raise ValueError(f"{text}: there is nothing to repeat before it")
            current[-1] = _repeated(current[-1], text)
        elif kind == "class":
            if not text.endswith("]") or len(text) < 3:
                return expression
            _append(current, _Element(_class(text)))
        else:
            if kind == "escape" and (what := _UNKNOWN_ESCAPES.get(text)):
                raise ValueError(f"{text}: {what}")
            # An unmatched closing bracket is a character.
            literal = f"\\{text}" if text in ("]", "}") else text
            begins, ends = text == "^", text == "$"
            _append(current, _Element(literal, empty=begins or ends, begins=begins, ends=ends))
    return expression if len(groups) > 1 else groups[0].expression()


def _append(elements: list[_Element], element: _Element) -> None:
    if element.begins and not all(each.begins for each in elements):
        raise ValueError("^: nothing can match, because the expression has text before it")
    if elements and elements[-1].ends and not element.ends:
        raise ValueError("$: nothing can match, because the expression has text after it")
    elements.append(element)


def _check_open(text: str) -> None:
    if text == "(?" or ("<" in text and not text.endswith(">")):
        raise ValueError("(?: flags, look-ahead and look-behind are not supported")


def _repeated(element: _Element, sign: str) -> _Element:
    if element.repeated:
        if sign == "?":  # makes a repetition lazy, which does not change the language
            return element
        raise ValueError(f"{sign}: put parentheses around a repetition that is repeated")
    if element.begins or element.ends:
        raise ValueError(f"{sign}: an anchor is repeated")
    if element.empty:
        return _Element(element.text, empty=True, repeated=True)
    low, _, high = sign[1:-1].partition(",")
    if sign[0] == "{":
        most = high if "," in sign else low
        if most and not most.strip("0"):
            return _Element("", empty=True, repeated=True)
        if element.optional:
            sign = f"{{0,{most}}}" if most else "*"
    if element.filled and (sign in ("*", "+") or sign.endswith(",}")):
        return _Element(f"({element.filled})*", element.filled, repeated=True)
    absent = sign in ("*", "?") or (sign[0] == "{" and not low.strip("0"))
    filled = element.filled or (element.text if absent else "")
    return _Element(element.text + sign, filled, repeated=True)


def _class(text: str) -> str:
    """Return a class with escaped brackets, which every dialect reads alike."""
    start = 2 if text[1] == "^" else 1
    body = text[start:-1]
    if body.startswith("]"):
        body = f"\\{body}"
    return f"{text[:start]}{_CLASS_PART.sub(_class_part, body)}]"


def _class_part(found: re.Match[str]) -> str:
    part = found.group()
    if part in ("--", "&&", "~~"):
        raise ValueError(f"{part}: operations on classes are not supported; escape the characters")
    return "\\[" if part == "[" else part


def _without_anchors(elements: list[_Element]) -> list[_Element]:
    return [element for element in elements if element.text not in ("^", "$")]


def _is_empty(elements: list[_Element]) -> bool:
    return all(element.empty for element in elements)


def _may_be_empty(elements: list[_Element]) -> bool:
    return all(element.empty or element.filled for element in elements)


def _filled(elements: list[_Element]) -> str:
    if not _may_be_empty(elements):
        return _written(elements)
    return "|".join(dict.fromkeys([each.filled for each in elements if each.filled]))


def _written(elements: list[_Element]) -> str:
    return "".join([element.written() for element in elements])
