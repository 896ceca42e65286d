"""Parsing of untrusted JSON: the same values as any parser, or a quick refusal."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.strict_json import load, load_object
from gateway.errors import InvalidRequest
from tests.support.cpu import costs_less_than
from tests.support.examples import scale_examples

CPU_SECONDS = 1.0  # the slowest input takes 0.3
MEGABYTES = 8 * 1024 * 1024

TEXT = st.text(st.sampled_from('a:"\\{}[],é\n')) | st.text(st.characters(codec="utf-8"))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@given(VALUES, st.booleans())
def test_what_is_json_is_read_as_others_read_it(value: Any, ascii_only: bool) -> None:
    assert load(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary() | st.text(st.sampled_from('{}[]":,1\\ ')).map(str.encode))
def test_bytes_are_read_as_orjson_reads_them_or_refused(text: bytes) -> None:
    try:
        value = load(text)
    except InvalidRequest:
        return
    assert value == orjson.loads(text)


@given(st.dictionaries(TEXT, VALUES, min_size=1), st.data())
@scale_examples(0.5)
def test_a_key_that_comes_twice_is_named(members: dict[str, Any], data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(sorted(members)))
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in members.items()]
    text = "{" + ", ".join([*parts, f"{json.dumps(twice)}: 1"]) + "}"
    nested = data.draw(st.sampled_from([text, f"[[{text}]]", f'{{"a": [{text}]}}']))
    with pytest.raises(InvalidRequest, match="twice in one object") as caught:
        load(nested.encode())
    assert repr(twice)[:100] in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not valid JSON"),
        (b"NaN", "not valid JSON"),
        (b"[Infinity]", "not valid JSON"),
        (b"1e999", "not valid JSON"),
        (b"9" * 1000, "not valid JSON"),
        (rb'"\ud800"', "not valid JSON"),
        (b'"\xed\xa0\x80"', "not valid JSON"),
        (b'"\xff"', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b"[" * 101 + b"]" * 101, "more than 100 levels"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "more than 100 levels"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[" * MEGABYTES, "objects and arrays"),
        (b'{"a":' * (MEGABYTES // 5), "keys and strings"),
        (b"[" + b"{}," * (MEGABYTES // 3) + b"{}]", "objects and arrays"),
        (b"[" + b'"",' * (MEGABYTES // 3) + b'""]', "keys and strings"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(5000)) + b"}", "an object of 5000 keys"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_hostile_text_is_refused_quickly(text: bytes, says: str) -> None:
    with costs_less_than(CPU_SECONDS), pytest.raises(InvalidRequest, match=says):
        load(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100 + b"]" * 100,
        b"[" + b"1," * (MEGABYTES // 2 - 2) + b"1]",
        b'"' + b":" * MEGABYTES + b'"',
        b'"' + rb"\"" * (MEGABYTES // 2) + b'"',
    ],
    ids=lambda value: repr(value[:12]),
)
def test_large_honest_text_is_read_quickly(text: bytes) -> None:
    with costs_less_than(CPU_SECONDS):
        load(text)


def test_a_body_is_an_object() -> None:
    assert load_object(b' {"a": 1} ') == {"a": 1}
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        load_object(b"[1]")
