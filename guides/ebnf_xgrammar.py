"""Rewriting of EBNF grammars for all releases of xgrammar.

Releases of xgrammar up to 0.1.18 expand a rule by recursion. A left-recursive rule overflows the
stack of the engine's process and ends it. Left-recursive rules are therefore refused. xgrammar also
converts ``x*`` to ``r ::= "" | x r``, which is left-recursive if ``x`` can match the empty text.
Such a repetition is rewritten to repeat only the non-empty texts of ``x``, which gives the same
language.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from guides.ebnf import parts_of, to_lark

# Values that state if an element can match the empty text: it cannot, it can also match other
# texts, or it matches nothing else.
_NEVER, _SOMETIMES, _ALWAYS = range(3)
_EMPTY = '""'
_BOUNDS = {"?": (0, 1), "*": (0, None), "+": (1, None)}


@dataclass(slots=True)
class _Element:
    """A string, character class, rule reference or group, with its repetition.

    `group` has the alternatives of a group. `most` is None for an unlimited repetition. `inner`
    states if the element without its repetition matches the empty text: `_NEVER`, `_SOMETIMES` or
    `_ALWAYS`. `outer` states the same for the element with its repetition.
    """

    kind: str
    text: str
    sign: str = ""
    least: int = 1
    most: int | None = 1
    group: list[list[_Element]] = field(default_factory=list)
    inner: int = _NEVER
    outer: int = _NEVER


_Alternatives = list[list[_Element]]


def to_xgrammar(ebnf: str) -> str:
    """Return the grammar in a form that every release of xgrammar compiles.

    Empty alternatives are written as ``""``, and each rule is on one line, as releases up to 0.1.18
    require. Raise ValueError for text that is not EBNF, and for a left-recursive rule.
    """
    if "::=" not in ebnf:
        # Mention Lark in the message: vLLM accepts Lark, so clients may send it here.
        raise ValueError(
            "the grammar has no rule; allowed: EBNF, whose rules are written `root ::= ...`, and "
            "not Lark (docs/structured-output.md#grammars)"
        )
    to_lark(ebnf)  # raises ValueError for malformed text
    rules = _parse(ebnf)
    empty = _Emptiness(rules)
    empty.find()
    return _Writer(rules, empty.of_rules).write()


def _parse(ebnf: str) -> dict[str, _Alternatives]:
    rules: dict[str, _Alternatives] = {}
    groups: list[_Alternatives] = [[[]]]
    for kind, text in parts_of(ebnf):
        alternatives = groups[-1]
        if kind == "defines":
            name = alternatives[-1].pop().text
            rules[name] = [[]]
            groups = [rules[name]]
        elif kind == "open":
            element = _Element("group", "", group=[[]])
            alternatives[-1].append(element)
            groups.append(element.group)
        elif kind == "close":
            groups.pop()
        elif kind == "or":
            alternatives.append([])
        elif kind in ("sign", "times"):
            _repeat(alternatives[-1], text)
        else:
            alternatives[-1].append(_Element(kind, text))
    return rules


def _repeat(sequence: list[_Element], sign: str) -> None:
    """Apply the repetition `sign`, such as ``*`` or ``{2,3}``, to a sequence's last element."""
    if sign in _BOUNDS:
        least, most = _BOUNDS[sign]
    else:
        low, comma, high = sign[1:-1].partition(",")
        least = int(low)
        most = (int(high) if high.strip() else None) if comma else least
        # Write the count with ASCII digits and without white space.
        sign = f"{{{least},{'' if most is None else most}}}" if comma else f"{{{least}}}"
    element = sequence[-1]
    if most == 0:
        sequence[-1] = _Element("string", _EMPTY)
    else:
        element.sign, element.least, element.most = sign, least, most


class _Emptiness:
    """Search for elements that can match the empty text, and for left-recursive rules.

    In each sequence of a rule, the search reads the elements up to the first element that cannot
    match the empty text. A match of the rule can begin with any of these elements. If an element
    refers to another rule, the search reads that rule before it continues. If a rule is reached
    again while it is being read, it is left-recursive.
    """

    def __init__(self, rules: dict[str, _Alternatives]) -> None:
        self.of_rules: dict[str, int] = {}
        self._rules = rules

    def find(self) -> None:
        """Set `inner` and `outer` of all elements. Raise ValueError for a left-recursive rule."""
        for name in self._rules:
            self._find_rule(name)
        # Set `inner` and `outer` of the elements that `_find_rule` did not read. This needs the
        # results for all rules.
        for alternatives in self._rules.values():
            for _ in self._read_all(alternatives, to_end=True):
                raise AssertionError("a rule is unknown")

    def _find_rule(self, name: str) -> None:
        # Use a stack of generators instead of recursion: a chain of rules may exceed Python's
        # recursion limit.
        started: dict[str, Generator[str, None, int]] = {}
        waiting = [name] if name not in self.of_rules else []
        while waiting:
            name = waiting[-1]
            if name not in started:
                started[name] = self._read_all(self._rules[name])
            try:
                needed = next(started[name])
            except StopIteration as found:
                self.of_rules[name] = found.value
                del started[name]
                waiting.pop()
                continue
            if needed in started:
                raise ValueError(
                    f'the rule "{needed}" begins with itself, which xgrammar cannot compile; write '
                    f'the repetition with "*" or "+", or put the rule last: `list ::= item list`'
                )
            waiting.append(needed)

    def _read_all(
        self, alternatives: _Alternatives, *, to_end: bool = False
    ) -> Generator[str, None, int]:
        """Yield the names of rules that the caller must compute before it resumes this generator.

        The generator's return value states if the alternatives match the empty text: `_NEVER`,
        `_SOMETIMES` or `_ALWAYS`. If `to_end` is True, all elements of a sequence are read.
        """
        found = set()
        for sequence in alternatives:
            least = _ALWAYS
            for element in sequence:
                if least == _NEVER and not to_end:
                    break
                least = min(least, (yield from self._read(element, to_end=to_end)))
            found.add(least)
        return found.pop() if len(found) == 1 else _SOMETIMES

    def _read(self, element: _Element, *, to_end: bool) -> Generator[str, None, int]:
        if element.kind == "group":
            element.inner = yield from self._read_all(element.group, to_end=to_end)
        elif element.kind == "name":
            while element.text not in self.of_rules:
                yield element.text
            element.inner = self.of_rules[element.text]
        else:
            element.inner = _ALWAYS if element.text == _EMPTY else _NEVER
        absent = element.inner == _NEVER and element.least == 0
        element.outer = _SOMETIMES if absent else element.inner
        return element.outer


class _Writer:
    def __init__(self, rules: dict[str, _Alternatives], empty: dict[str, int]) -> None:
        self._rules = rules
        self._empty = empty
        # Names of added rules, by the name of the original rule. An added rule matches only the
        # non-empty texts of the original rule.
        self._filled: dict[str, str] = {}

    def write(self) -> str:
        lines = [
            f"{name} ::= {' | '.join(map(self._sequence, alternatives))}"
            for name, alternatives in self._rules.items()
        ]
        waiting = 0
        while waiting < len(self._filled):
            for name in list(self._filled)[waiting:]:
                waiting += 1
                body = " | ".join(dict.fromkeys(self._filled_alternatives(self._rules[name])))
                lines.append(f"{self._filled[name]} ::= {body}")
        return "\n".join(lines)

    def _sequence(self, elements: list[_Element]) -> str:
        return " ".join(map(self._element, elements)) or _EMPTY

    def _element(self, element: _Element) -> str:
        if element.most is None and element.inner != _NEVER:
            filled = " | ".join(dict.fromkeys(self._filled_base(element)))
            return f"( {filled} ) *" if filled else _EMPTY
        base = self._base(element)
        return f"{base} {element.sign}" if element.sign else base

    def _base(self, element: _Element) -> str:
        if element.kind != "group":
            return element.text
        return f"( {' | '.join(map(self._sequence, element.group))} )"

    def _filled_base(self, element: _Element) -> Iterable[str]:
        """Yield alternatives that replace `element` in an unlimited repetition.

        The alternatives never match the empty text. Their repetition matches the same texts as the
        repetition of `element`. A sequence whose elements can all match the empty text is replaced
        by its elements, each as an alternative: ``(a? b?)*`` becomes ``(a | b)*``.
        """
        if element.inner == _NEVER:
            yield self._base(element)
        elif element.kind == "group":
            yield from self._filled_alternatives(element.group)
        elif element.kind == "name" and element.inner == _SOMETIMES:
            yield self._filled_name(element.text)

    def _filled_alternatives(self, alternatives: _Alternatives) -> Iterable[str]:
        for sequence in alternatives:
            if any(element.outer == _NEVER for element in sequence):
                yield self._sequence(sequence)
                continue
            for element in sequence:
                yield from self._filled_base(element)

    def _filled_name(self, name: str) -> str:
        if name not in self._filled:
            filled = f"{name}_filled"
            while filled in self._rules:
                filled += "_"
            self._filled[name] = filled
        return self._filled[name]
