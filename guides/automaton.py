"""Estimate of the CPU time that xgrammar takes to compile a regular expression or grammar.

A position is one occurrence of a character or character class in the expression or grammar. At each
position, xgrammar tries all tokens of the model's vocabulary. The time for one position increases
with two numbers:

- the number of tokens whose first character the position allows,
- the number of positions at which xgrammar must try the next character of a token. Optional
  characters, as in ``[a-z]?[a-z]?``, increase this number.

See decision 018 in docs/decisions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from guides.releases import MAX_COST_US, Costs

Parts = Iterable[tuple[str, str]]

_OTHER = 1 << 128
"""Bit for all non-ASCII characters. Bits 0 to 127 of a character set are for ASCII characters."""
_EVERY = (1 << 129) - 1


def _bits(characters: str) -> int:
    found = 0
    for character in characters:
        code = ord(character)
        found |= 1 << code if code < 128 else _OTHER
    return found


_DIGITS = _bits("0123456789")
_LOWER = _bits("abcdefghijklmnopqrstuvwxyz")
_UPPER = _LOWER >> 32
_SPACE = _bits(" \t\n\r\f\v")
_WORD = _DIGITS | _LOWER | _UPPER | _bits("_")
_KINDS = (
    (_LOWER, 90.0),
    (_UPPER, 90.0),
    (_DIGITS, 12.0),
    (_SPACE, 240.0),
    (_EVERY & ~(_LOWER | _UPPER | _DIGITS | _SPACE | _OTHER), 60.0),
    (_OTHER, 100.0),
)
"""Pairs of a character class (as bits) and a cost in microseconds.

The cost is that of matching all tokens whose first character is in the class.
"""
# If a position allows only some characters of a class in `_KINDS`, only this fraction of the cost
# is counted, but at least `_MIN_SHARE`.
_MIN_SHARE = 0.1
_SHORTHANDS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_SHORTHANDS |= {name.upper(): _EVERY & ~bits for name, bits in list(_SHORTHANDS.items())}
_CONTROLS = dict(zip("nrtbfav0e", "\n\r\t\b\f\a\v\0\x1b", strict=True))
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]+)|\\u\{?([0-9A-Fa-f]{4,6})\}?|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL
)

# Number of characters of a token that `_Walk` simulates. `_Walk._moves_from` uses `_STEPS` if the
# xgrammar release merges equal states of the automaton (`Costs.merges`), else `_STEPS_UNMERGED`.
# `_Walk._find_repetitions` uses `_LOOP_STEPS`.
_STEPS = 4
_STEPS_UNMERGED = 8
_LOOP_STEPS = 8
_MAX_POSITIONS = 20_000
_MAX_EDGES = 300_000
_MAX_MOVES = 400_000


class TooLargeError(ValueError):
    """The automaton is much too large for xgrammar to compile within `MAX_COST_US`."""


def cost_of(parts: Parts, costs: Costs, *, is_ebnf: bool = False) -> float:
    """Return the estimated CPU time in microseconds to compile a regular expression or grammar.

    Return infinity if the automaton is too large.

    Args:
        parts: pairs (kind, text) from `expressions.parts_of` or `ebnf.parts_of`.
        costs: costs of the xgrammar release.
        is_ebnf: True for parts of an EBNF grammar, False for those of a regular expression.
    """
    try:
        return _Walk(_Automaton(parts, costs, is_ebnf=is_ebnf), costs).cost()
    except TooLargeError:
        return float("inf")


@dataclass(slots=True)
class _Fragment:
    """Part of the automaton for a subexpression, with its possible first and last positions.

    `is_nullable` is True if the subexpression can match the empty text.
    """

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    is_nullable: bool = True


@dataclass(slots=True)
class _Node:
    """Parsed element of an expression or grammar, with its repetition.

    The element is a set of characters (`bits`), a reference to a rule (`name`), or a group with
    alternative sequences of elements (`alternatives`). The element is repeated `least` to `most`
    times; `most` is None for no upper limit. `is_counted` is True if the repetition is written with
    braces, as in ``{n,m}``.
    """

    bits: int = 0
    name: str = ""
    alternatives: list[list[_Node]] | None = None
    least: int = 1
    most: int | None = 1
    is_counted: bool = False

    @property
    def is_repeated(self) -> bool:
        return (self.least, self.most) != (1, 1)


class _Automaton:
    """Automaton of an expression or grammar. Its states are called positions.

    A position is one occurrence of a character set or of a rule reference. Positions are numbered
    from 0. `characters`, `names` and `follow` have one entry for each position.

    Attributes:
        characters: bits of the characters that the position allows; 0 for a rule reference.
        names: name of the referenced rule; "" for a character set.
        follow: list of the positions that can come next.
        fragments: first and last positions of each rule, by rule name.
        ends: all positions at which a rule can end.
        loops: last positions of repetitions that are written with braces and have no upper limit,
            such as ``.{3,}``.
        repeats: positions of limited repetitions such as ``.{1,3}``, each with an id of the
            repetition.
    """

    def __init__(self, parts: Parts, costs: Costs, *, is_ebnf: bool) -> None:
        self.characters: list[int] = []
        self.names: list[str] = []
        self.follow: list[list[int]] = []
        self.fragments: dict[str, _Fragment] = {}
        self.ends: set[int] = set()
        self.loops: set[int] = set()
        self.repeats: dict[int, int] = {}
        self._edges = 0
        self._max_repeats = costs.max_repeats
        trees = _parse(parts, is_ebnf=is_ebnf)
        self._nullable = _nullable_rules(trees)
        # Exclude the rule "" of a regular expression. Nodes that are not rule references also have
        # the name "", and would look like references to this rule.
        self._inlined = {name: tree for name, tree in trees.items() if name and _is_inlined(tree)}
        for name, alternatives in trees.items():
            found = self._union(alternatives)
            self.fragments[name] = found
            self.ends.update(found.last)

    def _union(self, alternatives: list[list[_Node]]) -> _Fragment:
        found = _Fragment(is_nullable=False)
        for sequence in alternatives:
            each = self._sequence(sequence)
            found.first += each.first
            found.last += each.last
            found.is_nullable |= each.is_nullable
        return found

    def _sequence(self, nodes: list[_Node]) -> _Fragment:
        found = _Fragment()
        for number, node in enumerate(nodes):
            each = self._repeated(self._inline(node) if number == 0 or node.is_repeated else node)
            self._connect(found.last, each.first)
            if found.is_nullable:
                found.first = found.first + each.first
            found.last = each.last + found.last if each.is_nullable else each.last
            found.is_nullable &= each.is_nullable
        return found

    def _inline(self, node: _Node) -> _Node:
        """Return a copy of a node in which the rule's alternatives replace the rule reference.

        Return `node` itself if xgrammar does not replace references to this rule.
        """
        if node.name not in self._inlined:
            return node
        return replace(node, name="", alternatives=self._inlined[node.name])

    def _repeated(self, node: _Node) -> _Fragment:
        if node.most == 0:
            return _Fragment()
        count = max(node.least, 1) if node.most is None else node.most
        least = node.least
        if node.alternatives is None:
            least, count = min(least, self._max_repeats), min(count, self._max_repeats)
        found = _Fragment(is_nullable=least == 0)
        start = len(self.characters)
        before: list[int] = []
        begins = True
        for number in range(1, count + 1):
            positions = len(self.characters)
            each = self._once(node)
            if len(self.characters) == positions:  # further copies would not add any, either
                return _Fragment()
            self._connect(before, each.first)
            if begins:
                found.first = found.first + each.first
            if number == count and node.most is None:
                self._connect(each.last, each.first)
                if node.is_counted:
                    self.loops.update(each.last)
            before = each.last + before if each.is_nullable else each.last
            begins &= each.is_nullable
            if number >= least:
                found.last = found.last + each.last
            if number == least:
                found.is_nullable = begins
                found.last = list(before)
        if node.alternatives is None and node.most is not None and node.is_repeated:
            self.repeats.update(dict.fromkeys(range(start, len(self.characters)), start))
        return found

    def _once(self, node: _Node) -> _Fragment:
        if node.alternatives is not None:
            return self._union(node.alternatives)
        position = len(self.characters)
        if position >= _MAX_POSITIONS:
            raise TooLargeError
        self.characters.append(node.bits)
        self.names.append(node.name)
        self.follow.append([])
        return _Fragment([position], [position], bool(node.name) and node.name in self._nullable)

    def _connect(self, lasts: list[int], firsts: list[int]) -> None:
        self._edges += len(lasts) * len(firsts)
        if self._edges > _MAX_EDGES:
            raise TooLargeError
        for last in lasts:
            self.follow[last] += firsts


class _Walk:
    """Simulation of how xgrammar matches tokens from each position of an automaton.

    A state of the simulation is called an item. An item is a pair (position, stack). The stack has
    the positions of the rule references that have been entered and not left. A stack is represented
    by the index of its top entry in `_entered`. Equal stacks have the same index. An entry is a
    pair: the position of the innermost reference, and the index of the stack below it. Index 0 is
    the empty stack.
    """

    def __init__(self, automaton: _Automaton, costs: Costs) -> None:
        self._automaton = automaton
        self._costs = costs
        self._moves = 0
        self._within: dict[tuple[int, int], int] = {}
        self._entered: list[tuple[int, int]] = [(0, 0)]

    def cost(self) -> float:
        """Return the estimated microseconds to compile the expression or grammar.

        Raise TooLargeError if the estimate or the simulation exceeds a limit.
        """
        found = 0.0
        for position, bits in enumerate(self._automaton.characters):
            if bits:
                found += self._costs.character + self._of_position(position, bits)
            if found > 4 * MAX_COST_US:
                raise TooLargeError
        return found

    def _of_position(self, position: int, bits: int) -> float:
        found = 0.0
        loops, repeats = self._find_repetitions(position, bits)
        ends = 8 if position in self._automaton.ends else 0
        for kind, cost in _KINDS:
            shared = bits & kind
            if shared:
                share = max(shared.bit_count() / kind.bit_count(), _MIN_SHARE)
                # xgrammar tries a position once for each rule that contains it, which is 1.8 times
                # on average. It tries the position of the token's first character only once.
                moves = 1.8 * self._moves_from(position, shared & -shared) - 0.8
                moves = moves * (1 + self._costs.loop * loops) + self._costs.repeat * repeats
                if bits.bit_count() > 1:
                    moves += 5 + ends
                found += cost * share * moves * 0.9
        return found * self._costs.classes

    def _moves_from(self, position: int, character: int) -> float:
        """Return how many positions xgrammar tries, on average, for one character of a token.

        The token starts at `position` with `character`. If the xgrammar release does not merge
        equal states, their number can grow with each character. A longer token is then simulated,
        and the result is deliberately too high.
        """
        merges = self._costs.merges
        steps = _STEPS if merges else _STEPS_UNMERGED
        items = [(position, 0)]
        moves = 0
        for _ in range(steps):
            reached = [item for each in items for item in self._after(*each)]
            moves += len(reached)
            if merges:
                reached = list(dict.fromkeys(reached))
            characters = self._automaton.characters
            items = [item for item in reached if characters[item[0]] & character]
            if not items and reached:
                bits = characters[reached[0][0]]
                character = bits & -bits
                items = [item for item in reached if characters[item[0]] & character]
        return moves / _STEPS

    def _find_repetitions(self, position: int, bits: int) -> tuple[int, int]:
        """Return the numbers of unlimited and of limited repetitions that one token can reach.

        The first repetition of each kind is not counted. `_Automaton.loops` has the unlimited
        repetitions, `_Automaton.repeats` the limited ones. The token starts at `position` and
        consists of characters in `bits`. xgrammar tries each way to divide the token among the
        repetitions, so the cost increases with their number.
        """
        automaton, costs = self._automaton, self._costs
        loops, repeats = automaton.loops, automaton.repeats
        if not (loops and costs.loop) and not (repeats and costs.repeat):
            return 0, 0
        items, seen = [(position, 0)], {position}
        for _ in range(_LOOP_STEPS):
            reached = dict.fromkeys([item for each in items for item in self._after(*each)])
            items = [item for item in reached if automaton.characters[item[0]] & bits]
            seen.update([position for position, _ in items])
        found = {repeats[each] for each in seen if each in repeats}
        return max(len(seen & loops) - 1, 0), max(len(found) - 1, 0)

    def _after(self, position: int, within: int) -> Iterator[tuple[int, int]]:
        """Yield the items that can follow the item (`position`, `within`)."""
        automaton = self._automaton
        waiting = [(each, within) for each in automaton.follow[position]]
        while within and position in automaton.ends:
            position, within = self._entered[within]
            self._count(1)
            waiting += [(each, within) for each in automaton.follow[position]]
        while waiting:
            self._count(1)
            position, within = waiting.pop()
            if automaton.characters[position]:
                yield position, within
                continue
            fragment = automaton.fragments.get(automaton.names[position])
            if fragment is None:
                continue
            inside = self._within.setdefault((position, within), len(self._entered))
            if inside == len(self._entered):
                self._entered.append((position, within))
            waiting += [(each, inside) for each in fragment.first]
            self._count(len(fragment.first))

    def _count(self, moves: int) -> None:
        self._moves += moves
        if self._moves > _MAX_MOVES:
            raise TooLargeError


def _parse(parts: Parts, *, is_ebnf: bool) -> dict[str, list[list[_Node]]]:
    """Return the alternative sequences of each rule, by rule name.

    A regular expression becomes a single rule with the name "".
    """
    rules: dict[str, list[list[_Node]]] = {"": [[]]}
    groups = [rules[""]]
    size = 1  # number of nodes that a repetition after them applies to
    for kind, text in parts:
        sequence = groups[-1][-1]
        if kind == "defines":
            name = sequence.pop().name
            rules[name] = [[]]
            groups = [rules[name]]
        elif kind == "open":
            alternatives: list[list[_Node]] = [[]]
            sequence.append(_Node(alternatives=alternatives))
            groups.append(alternatives)
        elif kind == "close":
            if len(groups) > 1:
                groups.pop()
        elif kind == "or":
            groups[-1].append([])
        elif kind in ("sign", "times"):
            if size != 1:
                start = len(sequence) - size
                sequence[start:] = [_Node(alternatives=[sequence[start:]])]
            if sequence:
                _repeat(sequence, text)
        elif kind == "name":
            sequence.append(_Node(name=text))
        elif kind == "string":
            nodes = [_Node(bits=bits) for bits, _ in _characters(text[1:-1])]
            sequence += nodes
            size = len(nodes)
            continue
        elif is_ebnf or text not in ("^", "$"):
            sequence.append(_Node(bits=_class(text, is_ebnf=is_ebnf)))
        size = 1
    return rules


def _repeat(sequence: list[_Node], sign: str) -> None:
    """Apply the repetition `sign`, such as ``*`` or ``{2,3}``, to the last node of a sequence."""
    bounds = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(sign)
    if bounds is None:
        low, comma, high = sign[1:-1].partition(",")
        least = min(int(low), _MAX_POSITIONS)
        most = int(high) if high.strip() else None
        bounds = (least, most if comma else least)
    last = sequence[-1]
    if last.is_repeated:
        last = sequence[-1] = _Node(alternatives=[[last]])
    last.least, last.most = bounds
    last.is_counted = sign.startswith("{")


def _class(text: str, *, is_ebnf: bool) -> int:
    """Return the characters that `text` matches, as bits.

    `text` is a character class such as ``[a-z]``, an escape or a single character.
    """
    if not text.startswith("["):
        if text == "." and not is_ebnf:
            return _EVERY & ~_bits("\n")
        return next(_characters(text), (_EVERY, False))[0] or _EVERY
    found, previous, is_range = 0, 0, False
    body = text[1:].removesuffix("]")
    is_negated = body.startswith("^")
    for bits, is_plain_hyphen in _characters(body[is_negated:]):
        if is_range:
            low, high = previous.bit_length(), bits.bit_length()
            found |= ((1 << high) - 1) & ~((1 << max(low - 1, 0)) - 1)
            is_range = False
        elif is_plain_hyphen and found:
            is_range = True
        else:
            found |= bits
            previous = bits
    if is_range:
        found |= _bits("-")
    return (_EVERY & ~found if is_negated else found) or _OTHER


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """Yield a pair (bits, is_hyphen) for each character or escape in a text.

    `is_hyphen` is True for a hyphen that is not escaped, which may denote a range in a class.
    """
    for x, u, long, escaped, plain in _CHARACTER.findall(text):
        if code := x or u or long:
            yield _bits(chr(min(int(code, 16), 0x10FFFF))), False
        elif escaped:
            known = _SHORTHANDS.get(escaped)
            yield known or _bits(_CONTROLS.get(escaped, escaped)), False
        else:
            yield _bits(plain), plain == "-"


def _nullable_rules(rules: dict[str, list[list[_Node]]]) -> set[str]:
    """Return the names of all rules that can match the empty text."""
    found: set[str] = set()
    users: dict[str, set[str]] = {}
    for name, alternatives in rules.items():
        for used in _names(alternatives):
            users.setdefault(used, set()).add(name)
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in found and _is_nullable(rules[name], found):
            found.add(name)
            waiting += users.get(name, ())
    return found


def _is_inlined(alternatives: list[list[_Node]]) -> bool:
    """Return True if xgrammar replaces references to this rule by a copy of the rule.

    xgrammar does so if all elements of the rule are characters, classes or classes with ``*``. The
    caller checks a second condition: the reference must be the first element of a sequence, or have
    a repetition. xgrammar first converts a repetition to a rule whose first element is the
    reference.
    """
    return all(
        sequence
        and all(
            not node.name
            and node.alternatives is None
            and (node.least, node.most) in ((1, 1), (0, None))
            for node in sequence
        )
        for sequence in alternatives
    )


def _names(alternatives: list[list[_Node]]) -> Iterator[str]:
    for sequence in alternatives:
        for node in sequence:
            if node.name:
                yield node.name
            if node.alternatives is not None:
                yield from _names(node.alternatives)


def _is_nullable(alternatives: list[list[_Node]], known: set[str]) -> bool:
    return any(
        all(
            node.least == 0
            or (node.name and node.name in known)
            or (node.alternatives is not None and _is_nullable(node.alternatives, known))
            for node in sequence
        )
        for sequence in alternatives
    )
