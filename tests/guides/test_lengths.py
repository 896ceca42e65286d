"""Strings with length limits: the guide sent for them, and the behaviour of xgrammar releases."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

from guides.schema.lengths import Form, length_pattern
from guides.worker import Checker
from tests.support.xgrammar_wheels import install_release, match_answers

PATTERNS = [form for form in get_args(Form) if form != "keywords"]
SET = {"0.1.18": "0.1.18", "0.1.25": "", "0.1.32": "", "0.2.8": "0.2.8"}
"""Value of GATEWAY_XGRAMMAR_RELEASE by xgrammar release."""


def _written(schema: dict[str, Any], release: str = "") -> Any:
    verdict = Checker(release).verdict("json_schema", json.dumps(schema), "xgrammar")
    assert verdict.refusal is None, verdict.refusal
    return json.loads(verdict.text)


@pytest.mark.parametrize("form", PATTERNS)
@pytest.mark.parametrize("least", [0, 1, 3, 20])
def test_a_pattern_has_exactly_the_lengths_between_its_bounds(form: Form, least: int) -> None:
    for most in [*range(least, 80), 100, 255, 256, 500, 540]:
        expression = re.compile(length_pattern(least, most, form))
        lengths = range(most + 70)
        found = [length for length in lengths if expression.fullmatch("x" * length)]
        assert found == list(range(least, most + 1)), (least, most)


@pytest.mark.parametrize("most", [20, 50, 64, 100, 120, 128, 150, 200, 255])
def test_usual_lengths_are_served_where_a_schema_is_strict(most: int) -> None:
    text = {"type": "string", "maxLength": most}
    for release in ("", "0.1.25", "0.1.32", "0.2.8"):
        _written(text, release)
        _written({**text, "minLength": 1}, release)
    fields = {f"p{number}": text for number in range(20)}
    written = _written({"type": "object", "properties": fields, "required": list(fields)})
    assert len(written["$defs"]) == 1
    assert "maxLength" not in str(written)


def test_patterns_of_lengths_replace_keywords_wherever_a_string_stands() -> None:
    text = {"type": "string", "maxLength": 3}
    pattern = {"type": "string", "pattern": length_pattern(0, 3, "blocks")}
    assert _written(text) == pattern
    assert _written({"type": "array", "items": text}) == {"type": "array", "items": pattern}
    assert _written({"type": ["string", "null"], "maxLength": 3})["anyOf"][0] == pattern
    others = {"type": "object", "additionalProperties": text}
    assert _written(others) == {**others, "additionalProperties": pattern}
    recursive = {
        "type": "object",
        "properties": {"maxLength": {"const": {"type": "string", "maxLength": 3}}, "a": text},
        "patternProperties": {"^x": {"$ref": "#/$defs/b"}},
        "$defs": {
            "b": {"prefixItems": [{**text, "minLength": 3}], "items": False, "type": "array"}
        },
    }
    written = _written(recursive)
    assert written["properties"] == {**recursive["properties"], "a": pattern}
    assert written["$defs"]["b"]["prefixItems"] == [
        {"type": "string", "pattern": length_pattern(3, 3, "blocks")}
    ]
    # No pattern is written for a minimum alone, nor for a release that compiles lengths faster.
    least = {"type": "string", "minLength": 3}
    assert _written(least) == least
    assert _written(text, "0.1.25") == text
    assert Checker().verdict("json_schema", json.dumps(text), "llguidance").text == json.dumps(
        text, separators=(",", ":")
    )


@pytest.mark.slow
@pytest.mark.parametrize("release", SET)
def test_each_release_accepts_the_lengths_between_the_bounds(release: str) -> None:
    cases: list[tuple[int, int]] = [(0, 1), (2, 2), (0, 20), (1, 30)]
    cases += [] if release == "0.1.18" else [(0, 100), (1, 120), (0, 255)]
    guides, expected = [], []
    for least, most in cases:
        schema = {"type": "string", "minLength": least, "maxLength": most}
        text = json.dumps(_written(schema, SET[release]))
        lengths = sorted({0, least, (least + most) // 2, most, most + 1, least - 1, most + 33})
        # A character counts as one, regardless of its number of bytes.
        answers = [(size, each * size) for size in lengths if size >= 0 for each in "xé界😀"]
        guides.append(("json_schema", text, [f'"{answer}"' for _, answer in answers]))
        expected.append([least <= size <= most for size, _ in answers])
    assert match_answers(install_release(release), guides) == expected


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.1.25", "0.1.32", "0.2.8"])
def test_strings_of_a_limited_length_are_valid_json(release: str) -> None:
    text = json.dumps(_written({"type": "string", "maxLength": 40}, SET[release]))
    answers = {'"plain / text"': True, '"a\tb"': False, '"a\x01"': False, '"a\nb"': False}
    # xgrammar does not count escapes, so strings with escapes are refused.
    answers |= {r'"a\nb"': False, r'"a\"b"': False, '"a"b"': False, "'a'": False, '"': False}
    found = match_answers(install_release(release), [("json_schema", text, list(answers))])
    assert found == [list(answers.values())]


@pytest.mark.parametrize("release", ["", "0.1.25", "0.2.8"])
@pytest.mark.parametrize("keyword", ["minLength", "maxLength", "minItems", "minimum"])
def test_numbers_too_large_for_a_float_do_not_end_the_process(keyword: str, release: str) -> None:
    """Check huge numbers, since one process compiles the guides of all tenants."""
    for value in (10**200, 10**400):
        Checker(release).verdict("json_schema", json.dumps({keyword: value}), "xgrammar")
