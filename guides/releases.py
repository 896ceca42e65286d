"""Costs of compiling a guide, by release of xgrammar.

The costs are microseconds of CPU time for a vocabulary of 32,000 tokens. A vocabulary of 128,000
takes up to 4.5 times as much. tests/guides/test_costs.py compares the costs with the released
wheels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from guides.schema.lengths import Form

MAX_COST_US = 250_000
"""Limit of a guide's estimated CPU time.

Machines differ, so an accepted guide may take twice as long.
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one compiler, in microseconds unless stated otherwise.

    `character` is the cost of a character of a name, value or string, `schema` that of a schema
    without its subschemas, and `optional` that of each pair of optional properties in one object.
    `reference` is the cost of each pair of references to one definition. `open_character` is the
    cost of a character in the property names of an object that allows other properties; a common
    prefix of names counts once.

    `length` is the cost of each character of a string's minLength or maxLength if these are sent as
    keywords. `max_length` limits this cost. `length_form` is the form in which the gateway sends a
    maximum length. `item` and `max_items` are the same for the number of items of an array.
    `digits` is a factor of the cost of number ranges.

    `loop` is a factor for positions from which a token can reach several loops such as ``.{3,}``.
    Each loop after the first adds `loop` times the normal cost of the position. `repeat` is the
    number of tries of a position that each further repetition of a class adds, such as
    ``[a-z]{1,3}`` or ``[a-z]?``.

    `classes` is a factor of the cost of character classes. A repeated class is compiled at most
    `max_repeats` times. `merges` is False for a compiler that does not merge equal states, so that
    it follows each way to match a text separately.
    """

    character: float = 6
    # Choose a value below the real cost, to accept 150 tools with a response format (0.47 s).
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
    loop: float = 4
    repeat: float = 6
    classes: float = 1
    max_repeats: int = 200
    merges: bool = True


NEWEST = Costs()
"""Costs of the slowest of the releases 0.1.25 to 0.1.33.

Release 0.2 takes longer only for strings of limited length.
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
        replace(_UNROLLED, character=650, schema=12_000, digits=22, classes=2, merges=False),
    ),
    ((0, 1, 25), _UNROLLED),
    # In 0.1.25 and 0.1.26, a limited length or a repeated class is a single state.
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
_SINCE_0_2 = replace(NEWEST, length_form="class", repeat=0)


def find_costs(release: str) -> Costs:
    """Return the costs of a release such as ``0.1.25``.

    For an empty text, return the costs of 0.1.25 to 0.1.33. Raise ValueError for a text that is not
    a release.
    """
    if not release:
        return NEWEST
    numbers = tuple([int(number) for number in release.split(".")[:3]])
    return next((costs for end, costs in _BY_RELEASE if numbers < end), _SINCE_0_2)
