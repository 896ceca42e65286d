"""Costs of compiling a guide, by release of xgrammar.

The costs are CPU time for a vocabulary of 32,000 tokens, in microseconds; a vocabulary of 128,000
takes up to 4.5 times as much. tests/guides/test_costs.py compares them with the released wheels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from guides.schema.lengths import Form

MAX_COST_US = 250_000
"""Half of the CPU time that compiling an accepted guide may take, as machines differ."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one compiler.

    `character` is a character of a name, value or string, `schema` a schema without its parts, and
    `optional` a pair of optional properties of one object. `reference` is a pair of references to
    one definition. `open_character` is a character of the
    names of properties whose object allows others: a beginning that names share counts once.

    `length` and `max_length` are a string of a limited length that is sent as keywords: for each
    character, and at most. `length_form` is how the gateway sends a maximum length.
    `item` and `max_items` are the same of an array. `digits` multiplies what a range of numbers
    costs.

    `loop` is what each further loop such as ``.{3,}`` adds to a position from which a token gets to
    several, as a multiple of what the position costs otherwise.

    `classes` multiplies what a class of characters costs. A class that is repeated is compiled at
    most `max_repeats` times. `merges` is False for a compiler that follows each way to read a text
    by itself.
    """

    character: float = 6
    schema: float = 100  # less than it takes, so that 150 tools beside a format are served: 0.47 s
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
    classes: float = 1
    max_repeats: int = 200
    merges: bool = True


NEWEST = Costs()
"""No release from 0.1.25 to 0.1.33 takes longer; 0.2 does for limited lengths of strings only."""
_UNROLLED = replace(
    NEWEST,
    character=10,
    optional=7,
    max_length=inf,
    length_form="keywords",
    item=250,
    max_items=inf,
    loop=0,
    max_repeats=10_000,
)
_BY_RELEASE = (
    # Compiles each character of a text for the whole vocabulary.
    (
        (0, 1, 20),
        replace(_UNROLLED, character=650, schema=12_000, digits=22, classes=2, merges=False),
    ),
    ((0, 1, 25), _UNROLLED),
    # Limited lengths and repeated classes are one state there.
    (
        (0, 1, 27),
        replace(
            NEWEST,
            open_character=60,
            length=7_000,
            max_length=28_000,
            length_form="keywords",
            loop=0,
            max_repeats=4,
        ),
    ),
    ((0, 2, 0), NEWEST),
)
_SINCE_0_2 = replace(NEWEST, length_form="class")


def find_costs(release: str) -> Costs:
    """Return the costs of a release such as ``0.1.25``; of 0.1.25 to 0.1.33 for an empty text.

    Raises ValueError for a text that is no release.
    """
    if not release:
        return NEWEST
    numbers = tuple([int(number) for number in release.split(".")[:3]])
    return next((costs for end, costs in _BY_RELEASE if numbers < end), _SINCE_0_2)
