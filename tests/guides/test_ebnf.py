"""xgrammar's EBNF as the gateway parses it, checked by what llguidance then accepts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from guides.ebnf import MAX_DEPTH, MAX_LENGTH, to_lark
from guides.ebnf_xgrammar import to_xgrammar
from guides.worker import CPU_S
from tests.support.cpu import costs_less_than

TOKENIZER = Path(__file__).parents[2] / "demo" / "model" / "tokenizer.json"

JSON = r"""
root ::= object  # as in xgrammar's own examples
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (pair ("," ws pair)*)? ws "}"
pair ::= string ws ":" ws value
array ::= "[" ws (value ("," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
ws ::= [ \n\t]{0,20}
"""


@cache
def tokenizers() -> tuple[Tokenizer, LLTokenizer]:
    return Tokenizer.from_file(str(TOKENIZER)), LLTokenizer(TOKENIZER.read_text())


def matches(ebnf: str, text: str) -> bool:
    tokenizer, vocabulary = tokenizers()
    grammar = LLMatcher.grammar_from_lark(to_lark(ebnf))
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("ebnf", "good", "bad"),
    [
        ('root ::= (e "=" t)+\ne ::= t ([-+*/] t)*\nt ::= [0-9]+', ["1+2=3", "4=4"], ["1+", ""]),
        ('root ::= "a"\n  | "b" "c"\n\n  | "d"', ["a", "bc", "d"], ["b", "ad"]),
        ('root ::=\n  "a"\n  b\nb ::= "b"', ["ab"], ["a", "b"]),
        ('root ::= root "a" | "a"', ["a", "aaa"], ["", "b"]),
        ('root ::= "" | "(" root ")"', ["", "(())"], ["(()"]),
        ('root ::= "a" ("" | "b") ()', ["a", "ab"], ["b"]),
        ('root ::= [a-z]* "end"', ["end", "send", "endend"], ["en", "endx"]),
        ('root ::= "if" | word "="\nword ::= [a-z]+', ["if", "if=", "iff="], ["iff"]),
        ('root ::= "a"{2} "b"{1,2} "c"{1,} "d"{0} "e"{0,0}', ["aabc", "aabbcc"], ["abc", "aabcd"]),
        ('root ::= start foo_bar fooBar Foo.1-x\nstart ::= "s"\nfoo_bar ::= "1"\n'
         'fooBar ::= "2"\nFoo.1-x ::= "3"', ["s123"], ["s"]),
        (r'root ::= "\x41\u00e9\U0001F600\"\\\/\n"', ['Aé😀"\\/\n'], ["A"]),
        (r"root ::= [\]\-\[^a-]+", ["]-[^a"], ["b", "\\"]),
        (r"root ::= [^a-c\n]+", ["dé😀"], ["a", "\n"]),
        ("root ::= [^]", ["a", "\n", "😀"], ["", "ab"]),
        ("root ::= [😀-😂] '中'".replace("'", '"'), ["😀中", "😁中"], ["😃中"]),
        ('# one\nroot ::= "a" # two\n# "three"', ["a"], ["b"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\n\\u00e9", true, {}]}', "{ }"], ["{", "[]", '{"a": 01}']),
    ],
)  # fmt: skip
def test_a_grammar_matches_what_it_says(ebnf: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not matches(ebnf, text)] == []
    assert [text for text in bad if matches(ebnf, text)] == []


@pytest.mark.parametrize(
    ("ebnf", "text"),
    [
        ("root ::= x", 'line 1, column 10: rule "x" is not defined'),
        ('x ::= "a"', 'there is no rule "root"'),
        ("", 'there is no rule "root"'),
        ('root ::= "a"\nroot ::= "b"', 'line 2, column 1: rule "root" is defined twice'),
        ('root "a"', "line 1, column 1: expected `name ::=`"),
        ('root ::= ("a"', "line 1, column 10: this group is not closed"),
        ('root ::= "a")', "line 1, column 13: unexpected )"),
        ('root ::= "a"++', "line 1, column 14: unexpected +"),
        ("root ::= *", "line 1, column 10: unexpected *"),
        ('root ::= "a', "line 1, column 10: unexpected '\"'"),
        ("root ::= 'a'", 'line 1, column 10: unexpected "\'"'),
        (r'root ::= "\q"', r'line 1, column 10: unknown escape \q in "\q"'),
        (r"root ::= [\d]", r"line 1, column 10: unknown escape \d in [\d]"),
        (r'root ::= "\ud800"', r"line 1, column 10: \ud800 is not a character"),
        (r'root ::= "\x110000"', r"line 1, column 10: \x110000 is not a character"),
        ("root ::= [z-a]", "line 1, column 10: [z-a]: a range ends before it begins"),
        ("root ::= .", "line 1, column 10: unexpected '.'"),
        ('root ::= "\0"', "line 1, column 10: \0 is not a character"),
        ("root ::= []", "line 1, column 10: [] matches nothing"),
        ('root ::= "a"{3,2}', "line 1, column 13: {3,2}: the upper bound is below the lower one"),
        ('root ::= "a"{1,9999999999}', "line 1, column 13: a count has more than 9 digits"),
        ('root ::= "a"{,2}', "line 1, column 13: unexpected '{'"),
        ('root ::= Token(5) "a"', "line 1, column 10: the macro Token is not supported"),
        ("root ::= " + "(" * 200 + ")" * 200, f"groups are nested more than {MAX_DEPTH} deep"),
        ("#" * (MAX_LENGTH + 1), f"{MAX_LENGTH + 1} characters, allowed at most {MAX_LENGTH}"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(ebnf: str, text: str) -> None:
    with pytest.raises(ValueError, match="EBNF error") as raised:
        to_lark(ebnf)
    assert text in str(raised.value)


ALPHABET = "abé"
letters = st.sampled_from(ALPHABET)
bounds = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda b: (b[0], b[0] + b[1]))
repetitions = st.sampled_from(("?", "*", "+", "{1,}")) | bounds.map(lambda b: f"{{{b[0]},{b[1]}}}")


def _twice(text: str) -> tuple[str, str]:
    """Return the text in EBNF and as a Python regex."""
    return f'"{text}"', re.escape(text)


def _class(chosen: tuple[str, bool]) -> tuple[str, str]:
    text = f"[{'^' if chosen[1] else ''}{chosen[0]}]"
    return text, text


def _quantified(parts: tuple[tuple[str, str], str]) -> tuple[str, str]:
    (ebnf, regex), times = parts
    return f"({ebnf}){times}", f"(?:{regex}){times}"


def _in_order(parts: list[tuple[str, str]]) -> tuple[str, str]:
    return " ".join(f"({ebnf})" for ebnf, _ in parts), "".join(f"(?:{r})" for _, r in parts)


def _longer(inner: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
    several = st.lists(inner, min_size=2, max_size=3)
    return (
        st.tuples(inner, repetitions).map(_quantified)
        | several.map(_in_order)
        | several.map(lambda p: (" | ".join(e for e, _ in p), "|".join(r for _, r in p)))
    )


expressions = st.recursive(
    st.text(letters, max_size=3).map(_twice)
    | st.tuples(st.text(letters, min_size=1, max_size=2), st.booleans()).map(_class),
    _longer,
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.tuples(expressions, repetitions), min_size=1, max_size=2))
def test_a_grammar_without_recursion_is_a_regular_expression(
    data: st.DataObject, rules: list[tuple[tuple[str, str], str]]
) -> None:
    ebnf = "root ::= " + " ".join(f"rule-{i}{times}" for i, (_, times) in enumerate(rules))
    ebnf += "".join(f"\nrule-{i} ::= {body}" for i, ((body, _), _) in enumerate(rules))
    regex = "".join(f"(?:{body}){times}" for (_, body), times in rules)
    # llguidance gives up on longer texts if a nested repetition is ambiguous.
    matching = st.from_regex(regex, fullmatch=True, alphabet=ALPHABET + "x")
    text = data.draw(matching.filter(lambda text: len(text) <= 40) | st.text(letters, max_size=6))
    expected = re.fullmatch(regex, text) is not None
    assert (matches(ebnf, text), matches(to_xgrammar(ebnf), text)) == (expected, expected)


@settings(max_examples=300)
@given(st.text(st.sampled_from('root::= \n"a\\x41-[]^(){}12,|?*+.#')) | st.text())
def test_any_text_is_converted_or_refused(text: str) -> None:
    try:
        lark = to_lark(f"root ::= {text}")
    except ValueError:
        return
    grammar = LLMatcher.grammar_from_lark(lark)
    assert not LLMatcher(tokenizers()[1], grammar, log_level=0).is_error()


@pytest.mark.parametrize(
    ("ebnf", "expected"),
    [
        ('root ::= "a" |', 'root ::= "a" | ""'),
        ('root ::= "a" |\nx ::= "b"', 'root ::= "a" | ""\nx ::= "b"'),
        ("root ::= ( | [a])\n b? # c\nb ::=", 'root ::= ( "" | [a] ) b ?\nb ::= ""'),
        ('root ::= ("a" | | "b")', 'root ::= ( "a" | "" | "b" )'),
        ("root ::= ()", 'root ::= ( "" )'),
        ('root ::= "|" [|(] "()"', 'root ::= "|" [|(] "()"'),
    ],
)
def test_each_rule_is_a_line_without_empty_alternatives(ebnf: str, expected: str) -> None:
    assert to_xgrammar(ebnf) == expected


@pytest.mark.parametrize(
    ("ebnf", "expected"),
    [
        ('root ::= "b" ("a"?)* "a"', 'root ::= "b" ( "a" ) * "a"'),
        ('root ::= ("a"? [b]* "c"{0,2})+', 'root ::= ( "a" | [b] | "c" ) *'),
        ('root ::= ("a" "b"? | "c"? ("d" |))*', 'root ::= ( "a" "b" ? | "c" | "d" ) *'),
        ('root ::= ("a"?){2,} "b"', 'root ::= ( "a" ) * "b"'),
        ('root ::= ("a"?){ 2 , 3 }', 'root ::= ( "a" ? ) {2,3}'),
        ('root ::= "b" ""* ("" | ())+ "a"{0}', 'root ::= "b" "" "" ""'),
        ('root ::= "b" x* "a"\nx ::= ""', 'root ::= "b" "" "a"\nx ::= ""'),
        (
            'root ::= x+ y x\nx ::= "a" x | y y\ny ::= "c"? | z\nz ::= ()',
            'root ::= ( x_filled ) * y x\nx ::= "a" x | y y\ny ::= "c" ? | z\nz ::= ( "" )\n'
            'x_filled ::= "a" x | y_filled\ny_filled ::= "c"',
        ),
        (
            'root ::= x*\nx ::= "a"?\nx_filled ::= "b"',
            'root ::= ( x_filled_ ) *\nx ::= "a" ?\nx_filled ::= "b"\nx_filled_ ::= "a"',
        ),
    ],
)
def test_what_is_repeated_is_never_empty(ebnf: str, expected: str) -> None:
    assert to_xgrammar(ebnf) == expected


@pytest.mark.parametrize(
    ("ebnf", "name"),
    [
        ('root ::= root "a" | "b"', "root"),
        ('root ::= "b" x\nx ::= ("c" | x) "d"', "x"),
        ('root ::= "b" x\nx ::= y x "c" | "d"\ny ::= "e"*', "x"),
        ('root ::= "b" x\nx ::= "e" | y\ny ::= (("d"? x)*)?', "x"),
        ('root ::= "b"\nx ::= x', "x"),
    ],
)
def test_a_rule_that_begins_with_itself_is_refused(ebnf: str, name: str) -> None:
    with pytest.raises(ValueError, match=f'the rule "{name}" begins with itself'):
        to_xgrammar(ebnf)


@pytest.mark.parametrize(
    ("ebnf", "end"),
    [
        ("root ::= " + "".join(f"r{i}*\nr{i} ::= " for i in range(5000)) + '"a"?', '"a"'),
        ('x ::= "a"?\nroot ::= ' + "(" * MAX_DEPTH + "x* " * 30000 + ")*" * MAX_DEPTH, '"a"'),
        ("root ::= [" + "a-b" * 40000 + "]", "a-b]"),
    ],
)
def test_large_grammars_take_linear_time(ebnf: str, end: str) -> None:
    with costs_less_than(CPU_S):
        assert to_xgrammar(ebnf).endswith(end)
