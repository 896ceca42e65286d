"""Tool calls in any text, cut anywhere: nothing is lost, and what was written comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.tools.events import CallArguments, CallStart
from gateway.parsers.tools.forced import (
    NamedToolParser,
    RequiredToolParser,
)
from tests.support.tool_calls import MAKERS, calls_of, content_of, cut, folded, parsed

pytestmark = pytest.mark.slow

# ---- Cut anywhere

FRAGMENTS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", '{"name": "f", ', '"arguments": ', '"parameters": ',
    '{"a": "b"}', '{"name": "g", "arguments": {}}', "{", "}", "[", "]", "(", ")", '"', "'", "\\",
    "\\u00e9", "\\ud83d", "\\ude00", "null", "1.5", ",", ";", ":", "=", " ", "\n", "f(", "x=",
    "[f(x=", "'''", "f", "<", "中", "🦉",
)  # fmt: skip
wild_text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)


@pytest.mark.parametrize("form", MAKERS)
@given(text=wild_text, data=st.data())
def test_the_result_does_not_depend_on_the_cuts(form: str, text: str, data: st.DataObject) -> None:
    whole = parsed(MAKERS[form], text)
    assert parsed(MAKERS[form], *cut(text, data)) == whole
    # A forced call that was cut before its name is nothing to show.
    if not calls_of(whole) and not (form == "required" and text.lstrip().startswith("[")):
        assert content_of(whole) == text


@pytest.mark.parametrize("form", MAKERS)
@given(text=wild_text, data=st.data())
def test_what_is_out_is_never_taken_back(form: str, text: str, data: st.DataObject) -> None:
    first = text[: data.draw(st.integers(0, len(text)))]
    pushed = folded(MAKERS[form]().parse(first))
    whole = parsed(MAKERS[form], text)
    assert len(pushed) <= len(whole)
    if pushed:
        assert pushed[:-1] == whole[: len(pushed) - 1]
        last, longer = pushed[-1], whole[len(pushed) - 1]
        assert type(last) is type(longer)
        if isinstance(last, CallStart) or isinstance(longer, CallStart):
            assert last == longer
        else:
            assert longer.text.startswith(last.text)


# ---- What templates make of calls comes back

names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,12}", fullmatch=True)
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | plain_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=8,
)
finite = values.filter(lambda value: "Infinity" not in json.dumps(value))
call_lists = st.lists(
    st.tuples(names, st.dictionaries(names, finite, max_size=3)), min_size=1, max_size=3
)
Calls = list[tuple[str, dict[str, Any]]]


def _hermes(calls: Calls, dump: Callable[[Any], str]) -> str:
    bodies = [dump({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def _hermes_arguments_first(calls: Calls, dump: Callable[[Any], str]) -> str:
    bodies = [dump({"arguments": arguments, "name": name}) for name, arguments in calls]
    return "\n".join(f"<tool_call>{body}</tool_call> " for body in bodies)


def _hermes_arguments_as_string(calls: Calls, dump: Callable[[Any], str]) -> str:
    return _hermes([(n, dump(a)) for n, a in calls], dump)  # type: ignore[misc]


def _llama(calls: Calls, dump: Callable[[Any], str]) -> str:
    return "; ".join(dump({"name": n, "parameters": a}) for n, a in calls)


def _llama_with_token(calls: Calls, dump: Callable[[Any], str]) -> str:
    typed = [dump({"type": "function", "name": n, "parameters": a}) for n, a in calls]
    return "<|python_tag|>" + ";".join(typed)


def _mistral_list(calls: Calls, dump: Callable[[Any], str]) -> str:
    return "[TOOL_CALLS] " + dump(
        [{"name": n, "arguments": a, "id": "a1b2c3d4e"} for n, a in calls]
    )


def _mistral_v11(calls: Calls, dump: Callable[[Any], str]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1b2c3d4e[ARGS]{dump(a)}" for n, a in calls)


def _mistral_v13(calls: Calls, dump: Callable[[Any], str]) -> str:
    return "".join(f"[TOOL_CALLS]{n}{dump(a)}" for n, a in calls)


def _pythonic(calls: Calls, dump: Callable[[Any], str]) -> str:
    written = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return f"[{', '.join(written)}]"


WRITERS = {
    _hermes: "hermes",
    _hermes_arguments_first: "hermes",
    _hermes_arguments_as_string: "hermes",
    _llama: "llama3_json",
    _llama_with_token: "llama3_json",
    _mistral_list: "mistral",
    _mistral_v11: "mistral",
    _mistral_v13: "mistral",
    _pythonic: "pythonic",
}
DUMPS: list[Callable[[Any], str]] = [
    json.dumps,
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    lambda value: json.dumps(value, indent=2),
]


@pytest.mark.parametrize("writer", WRITERS)
@given(calls=call_lists, dump=st.sampled_from(DUMPS), data=st.data())
def test_calls_come_back_as_they_were_written(
    writer: Callable[[Calls, Callable[[Any], str]], str],
    calls: Calls,
    dump: Callable[[Any], str],
    data: st.DataObject,
) -> None:
    events = parsed(MAKERS[WRITERS[writer]], *cut(writer(calls, dump), data))
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == calls
    assert content_of(events) == ""


@given(calls=call_lists, data=st.data())
def test_a_required_call_is_bare_json(calls: Calls, data: st.DataObject) -> None:
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    events = parsed(RequiredToolParser, *cut(text + "\n", data))
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == calls
    assert content_of(events) == ""


@given(arguments=st.dictionaries(names, finite, max_size=3), data=st.data())
def test_a_named_call_is_its_arguments(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(arguments)
    events = parsed(lambda: NamedToolParser("f"), *cut(text + "\n", data))
    assert events == [CallStart(0, "f"), CallArguments(0, text)]


FORCED = '[{"name": "f", "arguments": {"a": [1]}}, {"arguments": {"b": 2}, "name": "g"}]'


@pytest.mark.parametrize(
    ("end", "calls"),
    [
        ("[", []),
        ('[{"name"', []),
        ('[{"name": "f', []),
        ('[{"name": "f",', [("f", "")]),
        ('"arguments": ', [("f", "")]),
        ('{"a": [', [("f", '{"a": [')]),
        ('{"a": [1]}}', [("f", '{"a": [1]}')]),
        ('}}, {"arg', [("f", '{"a": [1]}')]),
        ('2}, "name": "g', [("f", '{"a": [1]}')]),
        ('"name": "g"}', [("f", '{"a": [1]}'), ("g", '{"b": 2}')]),
    ],
)
def test_a_required_call_that_was_cut(end: str, calls: list[tuple[str, str]]) -> None:
    events = parsed(RequiredToolParser, FORCED[: FORCED.index(end) + len(end)])
    assert calls_of(events) == calls
    assert content_of(events) == ""


@pytest.mark.parametrize("size", range(len(FORCED) + 1))
def test_no_cut_shows_the_guides_json(size: int) -> None:
    assert content_of(parsed(RequiredToolParser, FORCED[:size])) == ""


@pytest.mark.parametrize("text", ["", " \n", "{", '{"a": [1'])
def test_a_named_call_that_was_cut(text: str) -> None:
    assert calls_of(parsed(MAKERS["named"], text)) == [("f", text.strip())]
    assert content_of(parsed(MAKERS["named"], text)) == ""
