"""Python literals in the arguments of pythonic tool calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.tools.events import CallStart
from gateway.parsers.tools.forms import PARSERS
from tests.support.tool_calls import calls_of, content_of, parse_pieces, piece_sizes, split_text

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | plain_text,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(LITERALS, piece_sizes)
def test_python_literals_become_json(value: object, sizes: list[int]) -> None:
    [(_, arguments)] = calls_of(
        parse_pieces(PARSERS["pythonic"], *split_text(f"[f(a={value!r})]", sizes))
    )
    assert json.loads(arguments) == {"a": json.loads(json.dumps(value))}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("true", True),
        ("null", None),
        ("+3", 3),
        ("0x1F", 31),
        ("1_000", 1000),
        (".5", 0.5),
        ("007", "007"),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000),
        ("...", "..."),
        ("-1.50", -1.5),
        ("New York", "New York"),
        ("Martha's Vineyard", "Martha's Vineyard"),
        ("L'Aquila", "L'Aquila"),
        ("f('a, b')", "f('a, b')"),
        ("https://example.org/?a=(1,2)", "https://example.org/?a=(1,2)"),
        ("__import__('os').system('true')", "__import__('os').system('true')"),
        ("('a')", "a"),
        ("('a',)", ["a"]),
        ("('a', 'b')", ["a", "b"]),
        ("()", []),
        ("{1: 2, True: {}}", {"1": 2, "true": {}}),
        ("\"a\" \n 'b'", "ab"),
        ('"""a"b""c\n"""', 'a"b""c\n'),
        ("''", ""),
        (r"r'\d+\''", r"\d+\'"),
        (r"'\d\x41\101\u00e9\U0001f989\q\xZ\8'", "\\dAAé🦉\\q\\xZ\\8"),
        (r"'\ud83e\udd89'", "🦉"),
        (r"'\UFFFFFFFF'", r"\UFFFFFFFF"),
        ("'it\\\ns'", "its"),
    ],
)
def test_values_of_python_calls(source: str, value: object) -> None:
    [(_, arguments)] = calls_of(parse_pieces(PARSERS["pythonic"], *f"[f(a={source}, b=1)]"))
    assert json.loads(arguments) == {"a": value, "b": 1}


@pytest.mark.parametrize("source", ["]", "", "{1, 2}", "{'a': }", "[1}", "'a' b"])
def test_a_python_call_that_breaks_off_loses_nothing(source: str) -> None:
    events = parse_pieces(PARSERS["pythonic"], f"[f(a={source}, b=1)]")
    assert events[0] == CallStart(0, "f")
    assert content_of(events).endswith(", b=1)]")
