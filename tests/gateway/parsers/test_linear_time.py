"""Parsing time of the tool call parsers, which grows linearly with any text."""

from __future__ import annotations

import math

import pytest

from tests.support.slow_texts import (
    LONG_CHARS,
    SlowText,
    TextCost,
    find_slowest,
    message_forms,
    read_time,
)

# CPU seconds to search slow texts per parser. `python -m tests.support.slow_texts` searches longer.
_SEARCH_S = 0.2
_MAX_GROWTH = 5
"""Upper limit of the time ratio between a text and one a quarter as long."""
_MAX_CHAR_S = 15e-6
_RUNS = 10

_MAX_DEPTH_COST = 3
"""Upper limit of the time ratio between a string within 31 brackets and one outside."""

# Slow texts that searches found in earlier releases
_QUOTES_IN_A_VALUE = SlowText(((("[f(a=x",), 0), (("x'",), 1)))
_QUOTES_AFTER_BRACKETS = SlowText(((("[f(a=", "r<", "["), 0), (("'",), 1)))
_DECIMALS = SlowText(((("[f(a=[",), 0), (("1.5,",), 1)))


def _check(name: str, text: SlowText, chars: int) -> None:
    """Assert the time limits for the fastest of several runs, as other processes slow some runs."""
    form = message_forms()[name]
    short, long = text.of_length(LONG_CHARS // 4), text.of_length(LONG_CHARS)
    few = many = math.inf
    for _ in range(_RUNS):
        few = min(few, read_time(form, short, chars))
        many = min(many, read_time(form, long, chars))
        if many <= _MAX_GROWTH * few and many <= _MAX_CHAR_S * len(long):
            return
    raise AssertionError(
        f"{name}: {many / len(long) * 1e6:.1f} us a character, {many / few:.1f} times as much for "
        f"4 times the text: {chars} characters at a time of {text.parts}"
    )


@pytest.mark.parametrize("name", message_forms())
def test_the_slowest_text_that_a_search_finds_takes_linear_time(name: str) -> None:
    slowest: TextCost = find_slowest(name, _SEARCH_S)
    _check(name, slowest.text, slowest.chars)


@pytest.mark.parametrize("chars", [1, LONG_CHARS])
@pytest.mark.parametrize("text", [_QUOTES_IN_A_VALUE, _QUOTES_AFTER_BRACKETS, _DECIMALS])
def test_quotes_and_numbers_in_python_like_calls_take_linear_time(
    text: SlowText, chars: int
) -> None:
    _check("pythonic", text, chars)


def test_a_character_costs_the_same_however_deep_its_value_is() -> None:
    flat, deep = "a" * LONG_CHARS, "[" * 31 + '"' + "a" * LONG_CHARS
    seconds = [
        min(read_time(message_forms()["pythonic"], text, LONG_CHARS) for _ in range(_RUNS))
        for text in (f'[f(a="{flat}', f"[f(a={deep}")
    ]
    assert seconds[1] <= _MAX_DEPTH_COST * seconds[0]
