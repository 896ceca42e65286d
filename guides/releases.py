"""Estimated costs of compiling a guide (JSON schema, regex or grammar), by release of xgrammar.

The costs are microseconds of CPU time for a vocabulary of 32,000 tokens. With 128,000 tokens,
compiling takes up to 4.5 times as long. tests/guides/test_costs.py compares the costs with
measurements of the released wheels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from guides.schema.lengths import Form

MAX_COST_US = 250_000
"""Maximum estimated CPU time of a guide in microseconds.

Machines differ, so an accepted guide may take twice as long.
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one xgrammar release, in microseconds unless stated otherwise.

    Attributes:
        character: cost of each character of a property name, value or string.
        schema: cost of each schema, without its subschemas.
        optional: cost of each pair of optional properties in one object.
        reference: cost of each pair of references to one definition.
        open_character: cost of each character in the property names of an object that allows
            additional properties. A common prefix of several names counts once.
        length: cost of each character of a string's limited length, if the gateway sends the limit
            as the JSON schema keywords minLength and maxLength.
        max_length: upper bound of the cost of one such string.
        length_form: JSON schema keywords or kind of pattern with which the gateway sends a maximum
            length to the engine.
        item: cost per item of an array's minItems or maxItems, whichever number is larger.
        max_items: upper bound of the cost of one array's minItems and maxItems.
        digits: factor of the cost of number ranges.
        format_us: cost of each string with a `format`.
        format_factor: factor of the additional cost of particular formats, such as `email`.
        loop: factor for a position from which one token can reach several unlimited repetitions in
            braces, such as ``.{3,}``. Each of them, except the first, adds `loop` times the
            position's cost.
        repeat: number of additional tries at a position from which one token can reach several
            limited repetitions, such as ``[a-z]{1,3}`` or ``[a-z]?``. Each of them, except the
            first, adds this number.
        classes: factor of the cost of matching tokens at a position of an automaton.
        max_repeats: maximum number of copies of a repeated character class in the automaton.
        merges: False if the release does not merge equal states. Each way to match a text is then
            followed separately, which takes longer.
    """

    character: float = 6
    # This value is below the measured cost. With the measured cost, a request with 150 tools and a
    # response format would be refused. Such a request must be accepted, although its compilation
    # takes 0.47 s.
    schema: float = 100
    optional: float = 5
    reference: float = 9
    open_character: float = 5_500
    length: float = 7_000
    max_length: float = 1_300_000
    length_form: Form = "blocks"
    item: float = 170
    max_items: float = 22_000
    digits: float = 1
    format_us: float = 1_000
    format_factor: float = 1
    loop: float = 4
    repeat: float = 9
    classes: float = 1
    max_repeats: int = 200
    merges: bool = True


NEWEST = Costs()
"""Costs of the slowest release from 0.1.25 to 0.1.33.

Release 0.2 takes longer only for strings with a limited length.
"""
_UNROLLED = replace(
    NEWEST,
    character=10,
    optional=7,
    max_length=inf,
    length_form="keywords",
    item=250,
    max_items=inf,
    loop=0,
    repeat=0,
    max_repeats=10_000,
)
_BY_RELEASE = (
    # Releases before 0.1.20 match the complete vocabulary for each character of a text.
    (
        (0, 1, 20),
        replace(
            _UNROLLED,
            character=650,
            schema=12_000,
            digits=22,
            format_us=60_000,
            format_factor=12,
            classes=2,
            merges=False,
        ),
    ),
    ((0, 1, 25), _UNROLLED),
    # Releases 0.1.25 and 0.1.26 compile a limited length or a repeated class to a single state.
    (
        (0, 1, 27),
        replace(
            NEWEST,
            open_character=60,
            length=7_000,
            max_length=28_000,
            length_form="keywords",
            loop=0,
            max_repeats=10,
        ),
    ),
    ((0, 2, 0), NEWEST),
)
_SINCE_0_2 = replace(NEWEST, length_form="class")


def find_costs(release: str) -> Costs:
    """Return the costs of an xgrammar release such as ``0.1.25``.

    If `release` is empty, return `NEWEST`. Raise ValueError if `release` is not a release number.
    """
    if not release:
        return NEWEST
    numbers = tuple([int(number) for number in release.split(".")[:3]])
    return next((costs for end, costs in _BY_RELEASE if numbers < end), _SINCE_0_2)
