"""Tool calls in text: every form, cut anywhere; templates, ids and forced choices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Event
from gateway.parsers.tools.forced import (
    NamedToolParser,
    RequiredToolParser,
    named_guide,
    required_guide,
)
from gateway.parsers.tools.forms import PARSERS, Form, guess
from gateway.parsers.tools.ids import new_id, template_id
from gateway.parsers.tools.parser import ToolParser

FORMS: list[Form] = ["hermes", "llama3_json", "mistral", "pythonic"]
MAKERS: dict[str, Callable[[], ToolParser]] = {
    **PARSERS,
    "required": RequiredToolParser,
    "named": lambda: NamedToolParser("f"),
}


def _folded(events: list[Event]) -> list[Event]:
    folded: list[Event] = []
    for event in events:
        last = folded[-1] if folded else None
        if isinstance(event, Content) and isinstance(last, Content):
            folded[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            folded[-1] = CallArguments(event.index, last.text + event.text)
        else:
            folded.append(event)
    return folded


def _parse(maker: Callable[[], ToolParser], *pieces: str) -> list[Event]:
    parser = maker()
    events = [event for piece in pieces for event in parser.parse(piece)]
    return _folded(events + parser.finish())


def _content(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def _calls(events: list[Event]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert event.text
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        else:
            assert event.text
    return calls


def _cut(text: str, data: st.DataObject) -> Iterator[str]:
    while text:
        size = data.draw(st.integers(1, len(text)))
        yield text[:size]
        text = text[size:]


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
    whole = _parse(MAKERS[form], text)
    assert _parse(MAKERS[form], *_cut(text, data)) == whole
    # A forced call that was cut before its name is nothing to show.
    if not _calls(whole) and not (form == "required" and text.lstrip().startswith("[")):
        assert _content(whole) == text


@pytest.mark.parametrize("form", MAKERS)
@given(text=wild_text, data=st.data())
def test_what_is_out_is_never_taken_back(form: str, text: str, data: st.DataObject) -> None:
    first = text[: data.draw(st.integers(0, len(text)))]
    pushed = _folded(MAKERS[form]().parse(first))
    whole = _parse(MAKERS[form], text)
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
    events = _parse(MAKERS[WRITERS[writer]], *_cut(writer(calls, dump), data))
    assert [(name, json.loads(arguments)) for name, arguments in _calls(events)] == calls
    assert _content(events) == ""


@given(calls=call_lists, data=st.data())
def test_a_required_call_is_bare_json(calls: Calls, data: st.DataObject) -> None:
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    events = _parse(RequiredToolParser, *_cut(text + "\n", data))
    assert [(name, json.loads(arguments)) for name, arguments in _calls(events)] == calls
    assert _content(events) == ""


@given(arguments=st.dictionaries(names, finite, max_size=3), data=st.data())
def test_a_named_call_is_its_arguments(arguments: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(arguments)
    events = _parse(lambda: NamedToolParser("f"), *_cut(text + "\n", data))
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
    events = _parse(RequiredToolParser, FORCED[: FORCED.index(end) + len(end)])
    assert _calls(events) == calls
    assert _content(events) == ""


@pytest.mark.parametrize("size", range(len(FORCED) + 1))
def test_no_cut_shows_the_guides_json(size: int) -> None:
    assert _content(_parse(RequiredToolParser, FORCED[:size])) == ""


@pytest.mark.parametrize("text", ["", " \n", "{", '{"a": [1'])
def test_a_named_call_that_was_cut(text: str) -> None:
    assert _calls(_parse(MAKERS["named"], text)) == [("f", text.strip())]
    assert _content(_parse(MAKERS["named"], text)) == ""


# ---- Single cases, each form

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL: list[Event] = [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
SECOND: list[Event] = [CallStart(1, "g"), CallArguments(1, "{}")]


@pytest.mark.parametrize(
    ("form", "text", "events"),
    [
        ("hermes", f"Let me see.\n\n{HERMES}\n", [Content("Let me see."), *CALL]),
        ("hermes", f"\n {HERMES} Done.\n", [*CALL, Content(" Done.\n")]),
        ("hermes", f"<<tool_call> {HERMES}", [Content("<<tool_call>"), *CALL]),
        ("hermes", HERMES.replace("}}", "}"), CALL),
        ("hermes", HERMES.replace("}}", "}}}"), CALL),
        ("hermes", HERMES.replace("</tool_call>", "Done"), [*CALL, Content("\nDone")]),
        ("hermes", HERMES.replace("</tool_call>", HERMES.replace('f", "arguments": {"a": 1}', 'g"'))
         , [*CALL, *SECOND]),
        ("hermes", HERMES.replace('{"a": 1}', '{"a": 1}, "why": [1, "}"]'), CALL),
        ("hermes", HERMES.replace('"name"', '"why": {"b": "}"}, "name"'), CALL),
        ("hermes", HERMES.replace("1", '"</tool_call>"'),
         [CallStart(0, "f"), CallArguments(0, '{"a": "</tool_call>"}')]),
        ("hermes", HERMES.replace('{"a": 1}', "null"), [CallStart(0, "f"), CallArguments(0, "{}")]),
        ("hermes", HERMES.replace("1", '"x\ny"'),
         [CallStart(0, "f"), CallArguments(0, '{"a": "x\\ny"}')]),
        ("hermes", HERMES.replace("1}}", '{"b": 1}'),
         [CallStart(0, "f"), CallArguments(0, '{"a": {"b": 1}\n')]),
        ("llama3_json", 'So: {"name": "f", "arguments": {"a": 1}}', [Content("So:"), *CALL]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}};',
         [*CALL, *SECOND]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}} ; or {"b": 2}',
         [*CALL, Content(' or {"b": 2}')]),
        ("mistral", 'So: [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, ]',
         [Content("So:"), *CALL]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', CALL),
        ("mistral", '[TOOL_CALLS]f {"a": 1} [TOOL_CALLS] g [ARGS] {}', [*CALL, *SECOND]),
        ("pythonic", "\n[f(a=1), g()]\n", [*CALL, *SECOND]),
        ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", CALL),
        ("pythonic", "So: <|python_tag|>[f(a=1,)] or not", [Content("So:"), *CALL,
                                                           Content(" or not")]),
    ],
)  # fmt: skip
def test_calls_and_what_is_around_them(form: str, text: str, events: list[Event]) -> None:
    assert _parse(MAKERS[form], text) == events


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "a < b, <tool>, <tool_cal> and <tool_call> are no calls \n"),
        ("hermes", "<tool_call>f(x)</tool_call>"),
        ("hermes", '<tool_call>{"function": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", '{"name": "Ann"}'),
        ("llama3_json", '{"parameters": {}}'),
        ("llama3_json", "<|python_tag|>print({1: 2})"),
        ("llama3_json", "set x = {a} and {{b}} in { }\n"),
        ("mistral", "[TOOL_CALLS] are how I call"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]f[x]"),
        ("mistral", '[{"name": "f", "arguments": {}}]'),
        ("pythonic", "[1] A source. [f(x=1)]"),
        ("pythonic", "[f](https://example.org)"),
        ("pythonic", "[f(x)] and [f(x==1)]"),
        ("pythonic", "[f(x == 1)]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "f(x=1)"),
        ("required", "I cannot."),
        ("named", "I cannot."),
    ],
)
def test_what_only_looks_like_a_call_is_content_unchanged(form: str, text: str) -> None:
    assert _parse(MAKERS[form], text) == [Content(text)]


@pytest.mark.parametrize(
    ("form", "text", "events"),
    [
        ("hermes", "a\n<tool_c", [Content("a\n<tool_c")]),
        ("hermes", '<tool_call>\n{"name": "f', [Content('<tool_call>\n{"name": "f')]),
        ("hermes", '<tool_call>\n{"name": "f", "argu', [CallStart(0, "f")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00', [
            CallStart(0, "f"), CallArguments(0, '{"a": "\\u00')]),
        ("hermes", f"{HERMES}\n<tool_call>", [*CALL, Content("\n<tool_call>")]),
        ("llama3_json", '{"name": "f", "par', [Content('{"name": "f", "par')]),
        ("llama3_json", '{"name": "f", "parameters": {"a"', [
            CallStart(0, "f"), CallArguments(0, '{"a"')]),
        ("mistral", "[TOOL_CALLS]get_wea", [Content("[TOOL_CALLS]get_wea")]),
        ("mistral", "[TOOL_CALLS]f[ARGS]", [CallStart(0, "f")]),
        ("pythonic", "[f(", [Content("[f(")]),
        ("pythonic", '[f(a=1, b="x', [CallStart(0, "f"), CallArguments(0, '{"a": 1, "b": "x')]),
        ("pythonic", "[f(a=1), ", CALL),
        ("required", '[{"name": "f", "arguments": {"a"', [
            CallStart(0, "f"), CallArguments(0, '{"a"')]),
        ("named", '{"a"', [CallStart(0, "f"), CallArguments(0, '{"a"')]),
    ],
)  # fmt: skip
def test_a_call_that_is_cut_stays_cut(form: str, text: str, events: list[Event]) -> None:
    assert _parse(MAKERS[form], text) == events


@pytest.mark.parametrize(
    ("form", "pieces"),
    [
        ("hermes", [
            ("One ", [Content("One")]),
            ("two <t", [Content(" two")]),
            ("ool_call>\n", []),
            ('{"name": "f"', []),
            (', "arguments": {', [CallStart(0, "f"), CallArguments(0, "{")]),
            ('"a": "x', [CallArguments(0, '"a": "x')]),
            ('"}', [CallArguments(0, '"}')]),
            ("}\n</tool_call>", []),
        ]),
        ("llama3_json", [
            ('{"city"', []),
            (': "Paris"', [Content('{"city": "Paris"')]),
            (', "n": 1}', [Content(', "n": 1}')]),
        ]),
        ("mistral", [
            ("[TOOL_CALLS]f", []),
            ("{", [CallStart(0, "f"), CallArguments(0, "{")]),
        ]),
        ("pythonic", [
            ("[f(a=", []),
            ("'x", [CallStart(0, "f"), CallArguments(0, '{"a": "x')]),
            ("y\\", [CallArguments(0, "y")]),
            ("n'", [CallArguments(0, "\\n")]),
            (", b=1", [CallArguments(0, '", "b": ')]),
            ("2)", [CallArguments(0, "12}")]),
            (", g()", [CallStart(1, "g"), CallArguments(1, "{}")]),
        ]),
    ],
)  # fmt: skip
def test_everything_goes_out_as_soon_as_it_is_certain(
    form: str, pieces: list[tuple[str, list[Event]]]
) -> None:
    parser = MAKERS[form]()
    assert [(text, parser.parse(text)) for text, _ in pieces] == pieces


def test_calls_are_counted() -> None:
    parser = PARSERS["hermes"]()
    parser.parse(HERMES[:-40])
    assert parser.calls == 0
    parser.parse(HERMES[-40:] + HERMES)
    assert parser.calls == 2


# ---- Python literals

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | plain_text,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(LITERALS, st.data())
def test_python_literals_become_json(value: object, data: st.DataObject) -> None:
    [(_, arguments)] = _calls(_parse(PARSERS["pythonic"], *_cut(f"[f(a={value!r})]", data)))
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
    [(_, arguments)] = _calls(_parse(PARSERS["pythonic"], *f"[f(a={source}, b=1)]"))
    assert json.loads(arguments) == {"a": value, "b": 1}


@pytest.mark.parametrize("source", ["]", "", "{1, 2}", "{'a': }", "[1}", "'a' b"])
def test_a_python_call_that_breaks_off_loses_nothing(source: str) -> None:
    events = _parse(PARSERS["pythonic"], f"[f(a={source}, b=1)]")
    assert events[0] == CallStart(0, "f")
    assert _content(events).endswith(", b=1)]")


# ---- Size

N = 100_000


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{" * N),
        ("hermes", '<tool_call>{"a": "' * N),
        ("hermes", '<tool_call>{"a": ' + "[" * N),
        ("hermes", " " * N + "<tool_call>" + " " * N),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * N),
        ("llama3_json", '{"name":{"name":' * N),
        ("mistral", "[TOOL_CALLS][" * N),
        ("pythonic", "[f(x=" + "[" * N),
        ("pythonic", "[f(x=" + "-" * N + "1)]"),
        ("pythonic", "[f(x=" + "(" * N),
        ("pythonic", "[" * N),
    ],
)
def test_long_and_deep_text_takes_time_in_proportion(form: str, text: str) -> None:
    parser = MAKERS[form]()
    start = time.process_time()
    for position in range(0, len(text), 4):
        parser.parse(text[position : position + 4])
    parser.finish()
    # About 0.5 us a character; quadratic, it would be minutes.
    assert time.process_time() - start < 20e-6 * len(text)


# ---- Templates and ids


@pytest.mark.parametrize(
    ("fragment", "form"),
    [
        # Qwen2.5 and Qwen3
        (
            '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}'
            '{{- \'", "arguments": \' }}{{- tool_call.arguments | tojson }}'
            "{{- '}\\n</tool_call>' }}",
            "hermes",
        ),
        # Hermes 2 Pro and 3
        (
            '{{- \'{"name": <function-name>, "arguments": <args-dict>}\n\' }}'
            "{{- '</tool_call><|im_end|>' }}{{- '\\n<tool_call>\\n' }}",
            "hermes",
        ),
        # Llama 3.1, 3.2 and 3.3
        (
            '{{- \'Respond in the format {"name": function name, "parameters": dictionary of'
            ' argument name and its value}.\' }}{{- "<|python_tag|>" }}',
            "llama3_json",
        ),
        # Mistral 7B v0.3, Mistral Small 3.1, Devstral
        ('{{- "[TOOL_CALLS] [" }}{{- \', "id": "\' + tool_call.id + \'"}\' }}', "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
        # Llama 3.2 and 4 pythonic, ToolACE
        (
            "- Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
            "pythonic",
        ),
        (
            "you MUST put it in the format of [func_name1(params_name1=params_value1,"
            " params_name2=params_value2...), func_name2(params)]",
            "pythonic",
        ),
        # Qwen3-Coder and GLM-4.5: other forms within the same tags
        ("{{- '<tool_call>\\n<function=' + name + '>' }} \"arguments\"", None),
        ("{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key> \"arguments\"", None),
        # DeepSeek-V3
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']}}", None),
        # Without tools: Phi-3, Zephyr, ChatML
        ("{{'<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n'}}", None),
        ("{{'<|im_start|>' + message['role'] + '\\n' + message['content']}}", None),
        ("", None),
    ],
)
def test_the_form_is_guessed_from_the_template(fragment: str, form: Form | None) -> None:
    assert guess("{% for message in messages %}" + fragment + "{% endfor %}") == form


@pytest.mark.parametrize("form", FORMS)
def test_new_ids_fit_the_template(form: Form) -> None:
    ids = {new_id(form) for _ in range(200)}
    assert len(ids) == 200
    for call_id in ids:
        assert template_id(form, call_id) == call_id
        assert call_id.removeprefix("call_").isalnum()
        assert len(call_id) == (9 if form == "mistral" else 29)


@given(st.lists(st.text(max_size=40), unique=True))
def test_any_id_becomes_one_that_mistral_takes(call_ids: list[str]) -> None:
    mapped = [template_id("mistral", call_id) for call_id in call_ids]
    assert all(len(m) == 9 and m.isascii() and m.isalnum() for m in mapped)
    assert len(set(mapped)) == len(call_ids)
    assert mapped == [template_id("mistral", call_id) for call_id in call_ids]
    assert [template_id("hermes", call_id) for call_id in call_ids] == call_ids


# ---- Forced choices

UNIT = {"type": "string", "enum": ["C", "F"]}
WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "$ref": {"type": "string", "default": {"$ref": "kept"}},
    },
    "required": ["unit"],
    "$defs": {"Unit": UNIT},
    "$id": "https://example.org/weather",
}
TREE = {"type": "object", "properties": {"children": {"items": {"$ref": "#"}}}}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            elif key != "default":
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _resolve(document: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        document = document[part]
    return document


def test_the_guide_of_a_required_choice_holds_every_function() -> None:
    guide = json.loads(
        required_guide({"weather": WEATHER, "tree": TREE, "time": None}, parallel=True)
    )
    assert (guide["type"], guide["minItems"]) == ("array", 1)
    assert guide["maxItems"] == 8
    found = {}
    for call in guide["items"]["anyOf"]:
        assert call["required"] == list(call["properties"]) == ["name", "arguments"]
        assert call["additionalProperties"] is False
        [name] = call["properties"]["name"]["enum"]
        found[name] = _resolve(guide, call["properties"]["arguments"]["$ref"])
    assert list(found) == ["weather", "tree", "time"]
    assert found["time"] == {"type": "object", "properties": {}, "additionalProperties": False}
    # References lead where they led before.
    assert "$id" not in found["weather"]
    weather = found["weather"]["properties"]
    assert _resolve(guide, weather["unit"]["$ref"]) == UNIT
    assert weather["$ref"] == WEATHER["properties"]["$ref"]  # type: ignore[index]
    assert (
        _resolve(guide, found["tree"]["properties"]["children"]["items"]["$ref"]) == (found["tree"])
    )
    assert len(list(_references(guide))) == 5
    # The request's own schema is left alone.
    assert WEATHER["$id"]


def test_one_call_at_a_time() -> None:
    guide = json.loads(required_guide({"f": None}, parallel=False))
    assert (guide["minItems"], guide["maxItems"]) == (1, 1)


@pytest.mark.parametrize(
    ("parameters", "guide"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object", "additionalProperties": True}),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        (WEATHER, WEATHER),
        ({"$ref": "#/$defs/T", "$defs": {"T": TREE}}, {"$ref": "#/$defs/T", "$defs": {"T": TREE}}),
    ],
)
def test_the_guide_of_a_named_choice_is_its_parameters(
    parameters: dict[str, Any] | None, guide: dict[str, Any]
) -> None:
    assert json.loads(named_guide(parameters)) == guide


def test_schemas_that_cannot_be_moved_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"parameters of f refer to other\.json#/a") as refused:
        required_guide({"f": {"properties": {"a": {"$ref": "other.json#/a"}}}}, parallel=True)
    assert refused.value.param == "tools"
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="more than 100 levels"):
        required_guide({"f": deep}, parallel=True)
