"""Regexes rewritten for xgrammar match the same texts."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guides.expressions import to_xgrammar

IPV4 = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"


@pytest.mark.parametrize(
    ("expression", "written"),
    [
        ("(a|)b", "(a)?b"),
        ("(|a)b", "(a)?b"),
        ("(a||b)c", "(a|b)?c"),
        ("(a|^)b", "(a)?b"),
        ("a|", "(a)?"),
        ("^|a$", "(a)?"),
        ("^(a|)b$", "^(a)?b$"),
        ("(a|)+b", "(a)*b"),
        ("(a|){2,3}b", "(a){0,3}b"),
        ("(a|){2,}b", "(a)*b"),
        ("(a|)*?b", "(a)*b"),
        ("b(a?)*a", "b(a)*a"),
        ("b(a*){2,}a", "b(a)*a"),
        ("b(a?[bc]{0,2})+a", "b(a|[bc])*a"),
        ("((a*)*c?|de)*", "(a|c|de)*"),
        ("((a|)b|c?)+", "((a)?b|c)*"),
        ("(a?){2,3}", "(a?){2,3}"),
        ("b(a{0}|)*a", "ba"),
        ("(a?a*)*", "(a)*"),
        ("()b", "b"),
        ("(|)*b", "b"),
        ("a{0}b", "b"),
        ("", "()"),
        ("^$", "^()$"),
        ("(?:a)(?<n>b)(?P<m>c)", "(a)(b)(c)"),
        ("[]a][^]b][[]", r"[\]a][^\]b][\[]"),
        (r"a]\]}", r"a\]\]\}"),
        (IPV4, IPV4.replace("|)", ")?")),
    ],
)
def test_empty_alternatives_are_optional_groups(expression: str, written: str) -> None:
    assert to_xgrammar(expression) == written
    assert to_xgrammar(written) == written


PARTS = ("a", "b", "|", "|", "(", ")", "(?:", "*", "+", "?", "{2}", "{0}", "{1,2}", "[ab]", "[^a]")
PARTS += ("a?", "b*", ")*", ")+", "{1,}")
TEXTS = ["".join(text) for length in range(5) for text in product("ab", repeat=length)]


@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join))
def test_it_matches_the_same_texts(expression: str) -> None:
    try:
        asked = re.compile(expression)
        written = to_xgrammar(expression)
    except (re.error, ValueError):
        return
    found = re.compile(written)
    for text in TEXTS:
        assert bool(asked.fullmatch(text)) == bool(found.fullmatch(text)), (written, text)


@pytest.mark.parametrize("expression", ["b($)c", "a(^|b)c", ".(?:$)b", "a((?:){0,}^)", ".(^)+b"])
def test_an_anchor_with_something_beyond_it_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"nothing can match|repeated"):
        to_xgrammar(expression)


@pytest.mark.parametrize(
    ("expression", "rewritten"),
    [("(^a)b", "(a)b"), ("a(b$|c)", "a(b|c)"), ("^(a$)", "^(a)"), ("((^|a)b)$", "((a)?b)$")],
)
def test_an_anchor_at_the_end_of_a_group_may_be_the_end_of_all(
    expression: str, rewritten: str
) -> None:
    assert to_xgrammar(expression) == rewritten
