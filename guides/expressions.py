"""Rewriting of regular expressions to the subset that every release of xgrammar compiles.

Releases differ. 0.1.8 has no ``(?:`` groups. Releases up to 0.1.25 throw on an empty alternative
that is not the last of its group. The rewritten expression matches the same texts. A group with an
empty alternative becomes ``(...)?``, and each ``(?:...)`` becomes ``(...)``. A guide always matches
a complete text, so ``^`` at the beginning and ``$`` at the end match the empty text. All
other anchors are refused.

Releases up to 0.1.18 overflow the stack if a repeated part can be empty. The rewritten repetition
repeats only the non-empty texts, which gives the same language: ``(a?b*)+`` becomes ``(a|b)*``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# Pattern that splits any text into parts, in exactly one way and in linear time. An unclosed class
# or group name extends to the end of the text.
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
"""A token of a regular expression: (kind, text).

The kinds are the group names of `_EXPRESSION`, such as ``class`` or ``escape``.
"""


def parts_of(expression: str) -> Iterator[Part]:
    """Yield the tokens of a regular expression in the order of the text."""
    for found in _EXPRESSION.finditer(expression):
        yield found.lastgroup or "", found.group()


@dataclass(slots=True)
class _Element:
    """A character, class or group, with its repetition.

    Attributes:
        text: the rewritten text of the element.
        filled: text that replaces the element in a repetition, if the element can match the empty
            text; else "". The replacement matches only non-empty texts. Its repetition matches the
            same texts as the repetition of the element: ``a|b`` for ``(a?b*)``.
        empty: True if the element matches only the empty text.
        optional: True for a group with an empty alternative, which is written as ``(...)?``.
        repeated: True if the element has a repetition.
        begins: True for ``^`` and for a group with ``^``, which must be the first element.
        ends: True for ``$`` and for a group with ``$``, which must be the last element.
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
        """Return this group, rewritten, as an element of the enclosing group."""
        elements = [element for each in self.alternatives for element in each]
        begins = any(element.begins for element in elements)
        ends = any(element.ends for element in elements)
        # Leave out anchors, which compilers do not support in a group. An accepted anchor is at the
        # beginning or at the end of the expression, where it does not restrict the texts.
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
        """Return the rewritten regular expression. Call this for the outermost group."""
        first, *others = self.alternatives
        if _is_empty(first) and not others:
            anchors = _written(first)
            # Write an empty group, because releases of xgrammar crash on an expression without
            # elements.
            return f"^(){anchors.removeprefix('^')}" if anchors.startswith("^") else f"(){anchors}"
        if any(map(_is_empty, self.alternatives)):
            # Write the alternatives as one optional group without anchors, because compilers do not
            # support an anchor in a group.
            bare = [_without_anchors(each) for each in self.alternatives]
            return _Group(bare).element().written() or "()"
        return "|".join(map(_written, self.alternatives))


_UNICODE = "Unicode classes are not supported; list the characters"
_UNKNOWN_ESCAPES = {"\\": "no character comes after it", "\\p": _UNICODE, "\\P": _UNICODE}


def to_xgrammar(expression: str) -> str:
    """Return a regular expression rewritten to the subset that every xgrammar release compiles.

    Raise ValueError for an expression on which xgrammar throws, and which cannot be rewritten. An
    expression with an unclosed group or class is returned unchanged, because the compiler refuses
    it.
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
            # Escape a closing bracket without an opening one, which is an ordinary character.
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
        raise ValueError(
            "a group that begins with (? may only be (?:...), (?P<name>...) or (?<name>...): "
            "flags, look-ahead and look-behind are not supported"
        )


def _repeated(element: _Element, sign: str) -> _Element:
    if element.repeated:
        if sign == "?":  # ignore the second sign, which only makes the repetition lazy
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
    """Escape brackets inside a character class, so that all dialects read the class equally."""
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
