"""Guides refused before an engine compiles them: too large, or known to fail in xgrammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guides.kinds import MAX_CHARS, Backend, Kind
from guides.limits import check
from guides.worker import Checker

STRING = {"type": "string"}
TOO_LARGE = "allowed: 10000; divide it"


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker()


def _object(count: int, **more: Any) -> str:
    properties = {f"p{i}": STRING for i in range(count)}
    return json.dumps({"type": "object", "properties": properties, **more})


def _nested(depth: int) -> dict[str, Any]:
    if depth == 0:
        return STRING
    return {"type": "object", "properties": {"a": _nested(depth - 1)}, "required": ["a"]}


RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", _object(20, required=["p0"], additionalProperties=False)),
        ("json_schema", _object(150)),
        ("json_schema", json.dumps({"enum": [f"value number {i}" for i in range(1000)]})),
        ("json_schema", json.dumps(_nested(50))),
        ("json_schema", json.dumps(RECURSIVE)),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000}'),
        ("json_schema", '{"type": "string", "pattern": "^[a-z]{3}-[0-9]+$"}'),
        ("json_schema", '{"type": "object", "minProperties": 1, "x-order": 1}'),
        ("json_schema", '{"type": "integer", "minimum": 1.5}'),
        ("json_schema", '{"type": "array", "items": [{}], "format": "made-up"}'),
        ("json_schema", "true"),
        ("regex", r"(?:\d{1,3}\.){3}\d{1,3}|[a-z]+?@(?<host>[a-z]+)\.com"),
        ("regex", ".{50}"),
        ("regex", "[a-z]{1000}"),
        ("regex", "()a"),
        ("ebnf_grammar", 'root ::= ("a" | [b-z]){2,100} root?'),
        ("ebnf_grammar", "root ::= " + " | ".join(f'"word number {i}"' for i in range(1024))),
    ],
)
def test_what_people_send_is_a_guide(checker: Checker, kind: Kind, text: str) -> None:
    assert checker.verdict(kind, text, "xgrammar").refusal is None


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("json_schema", '{"$ref": "#"}', "$: $ref: # leads back to itself"),
        ("json_schema", '{"$ref": "http://localhost/x"}', "http://localhost/x"),
        ("json_schema", '{"$ref": "#/$defs/x"}', "does not exist"),
        ("json_schema", "[" * 100_000, "recursion"),
        ("json_schema", _object(400), "of it for optional properties; allowed: 0.25 s;"),
        ("json_schema", json.dumps({"enum": list(range(20_000))}), TOO_LARGE),
        ("json_schema", '{"type": "string", "maxLength": 1000000000}', TOO_LARGE),
        ("json_schema", '{"type": "string", "maxLength": 900}', "use smaller or equal values of"),
        ("regex", "[a-z]?" * 50, "use fewer repetitions, optional parts"),
        ("regex", "(|a|b)" * 200, "it would take xgrammar more than 1 s to compile"),
        ("ebnf_grammar", "root ::= " + '("a"|"b")? ' * 200, "1 s to compile; allowed"),
        ("json_schema", '{"type": "string", "pattern": "(?i)a"}', "$: pattern: a group that"),
        ("json_schema", '{"items": {"properties": {"a": {"pattern": "("}}}}', "$.items.properties"),
        ("regex", "(a{1000}){1000}", TOO_LARGE),
        ("regex", "a{999999999999999999999999}", TOO_LARGE),
        ("regex", "(((x{50}){50}){50}){50}", TOO_LARGE),
        ("regex", "a" * 100_000, TOO_LARGE),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "nest"),
        ("regex", "[" * 100_000, TOO_LARGE),
        ("regex", "[a", "regex parse error"),
        ("regex", "(", "regex parse error"),
        ("regex", "a" * (MAX_CHARS + 1), f"allowed: {MAX_CHARS}"),
        ("regex", "(?i)a", "flags, look-ahead"),
        ("regex", "(?=a)b", "look-ahead and look-behind are not"),
        ("regex", "(?<=a)b", "look-behind are not supported"),
        ("regex", "|*a", "there is nothing to repeat"),
        ("regex", r"\p{L}", "Unicode"),
        ("regex", "a\\", "no character comes after"),
        ("regex", "a**", "put parentheses around a repetition"),
        ("regex", "(a)\\1", "backreferences"),
        ("regex", "[a&&b]", "operations on classes"),
        ("ebnf_grammar", 'root ::= ("a"{1000}){1000}', TOO_LARGE),
        ("ebnf_grammar", 'root ::= "' + "a" * 100_000 + '"', TOO_LARGE),
        ("ebnf_grammar", "root ::= x", 'rule "x" is not defined'),
        ("ebnf_grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested more than"),
    ],
)  # fmt: skip
def test_what_an_engine_would_fail_on_is_refused(
    checker: Checker, kind: Kind, text: str, expected: str
) -> None:
    refusal = checker.verdict(kind, text, "xgrammar").refusal
    assert refusal is not None
    assert expected in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", r"(?i)\p{L}|"), ("ebnf_grammar", 'start: "a"'), ("json_schema", "true")],
)
def test_llguidance_has_its_own_dialect(checker: Checker, kind: Kind, text: str) -> None:
    assert checker.verdict(kind, text, "llguidance").refusal is None
    assert checker.verdict("json_schema", '{"not": {}}', "llguidance").refusal is not None


@given(
    st.sampled_from(["regex", "json_schema", "ebnf_grammar"]),
    st.text(st.sampled_from('root::= \n"a\\pP/{1}[](),|*+?.%$^&~<>-')) | st.text(),
    st.sampled_from(["xgrammar", "llguidance"]),
)
def test_any_text_is_a_guide_or_is_refused(kind: Kind, text: str, backend: Backend) -> None:
    try:
        check(kind, text, backend)
    except (ValueError, RecursionError):
        return
