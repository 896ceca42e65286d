"""Tool calls in text: examples for each format."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest

from gateway.parsers.tools.arguments import end_call
from gateway.parsers.tools.events import CallArguments, CallStart, Content, Event
from gateway.parsers.tools.forms import PARSERS, Form
from gateway.parsers.tools.parser import Functions, ToolParser
from tests.support.cpu import costs_less_than
from tests.support.tool_calls import MAKERS, calls_of, content_of, parse_pieces

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL: list[Event] = [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
SECOND: list[Event] = [CallStart(1, "g"), CallArguments(1, "{}")]


def _parser(form: str) -> ToolParser:
    """Return a parser for the format.

    `text` stands for `qwen3_coder` with typed parameters `s` and `n`.
    """
    if form == "text":
        functions = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}
        return PARSERS["qwen3_coder"](functions)
    return MAKERS[form]()


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
         [CallStart(0, "f"), CallArguments(0, '{"a": {"b": 1}\n}')]),
        ("hermes", HERMES.replace("1}}", '[{"b": "}"'),
         [CallStart(0, "f"), CallArguments(0, '{"a": [{"b": "}"\n}]}')]),
        ("minimax", '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}\n{"a": 1}',
         [*CALL, *SECOND, Content('\n{"a": 1}')]),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f```json{"a": 1}```\n```',
         [*CALL, Content("\n```")]),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function></tool_call></function>",
         [*CALL, Content("</function>")]),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter>So</function>",
         [CallStart(0, "f"), CallArguments(0, '{"a": "1</parameter>So"}')]),
        ("glm45", "<tool_call>f <arg_key> a </arg_key><arg_value>\n1 </arg_value></tool_call>!",
         [*CALL, Content("!")]),
        ("minimax_m2", '<invoke name="f"><parameter name="a">1</parameter></minimax:tool_call> So',
         [*CALL, Content(" So")]),
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
    assert parse_pieces(MAKERS[form], text) == events


@pytest.mark.parametrize("name", ["ns:tool", "ns/tool", "fs.read", "a-b"])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", '[TOOL_CALLS]{}{"a": 1}'),
        ("mistral", '[TOOL_CALLS]{}[CALL_ID]x1[ARGS]{"a": 1}'),
        ("pythonic", "[{}(a=1)]"),
        ("qwen3_coder", "<function={}><parameter=a>1</parameter></function>"),
        ("glm45", "<tool_call>{}\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("minimax_m2", '<invoke name="{}"><parameter name="a">1</parameter></invoke>'),
        ("kimi_k2", '<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{"a": 1}'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'),
    ],
)
def test_a_functions_name_may_have_all_that_requests_may(form: str, text: str, name: str) -> None:
    written = text.replace("{}", name, 1)
    assert parse_pieces(MAKERS[form], written) == [CallStart(0, name), CallArguments(0, '{"a": 1}')]


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
        ("hermes", "<tool_call>{}</tool_call>"),
        ("minimax", '<tool_calls>{"a": 1}</tool_calls>'),
        ("granite", "<|tool_call|> [1, 2]"),
        ("phi4_mini_json", "import functools; functools[0]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_call_begin|>f g<|tool_call_argument_begin|>{}"),
        ("qwen3_coder", "<tool_call> or <function=f> and <function=g>x</function>"),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("glm45", "<tool_call>f and <arg_key>a</arg_key>"),
        ("glm45", "<tool_call><arg_key>a</arg_key>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f" n="1"></invoke>'),
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
        ("pythonic", "[f(x:y=1)]"),
        ("pythonic", "[https://example.org]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "f(x=1)"),
        ("required", "I cannot."),
        ("named", "I cannot."),
    ],
)
def test_what_only_looks_like_a_call_is_content_unchanged(form: str, text: str) -> None:
    assert parse_pieces(MAKERS[form], text) == [Content(text)]


@pytest.mark.parametrize(
    ("form", "text", "events"),
    [
        ("hermes", "a\n<tool_c", [Content("a\n<tool_c")]),
        ("hermes", "a\n<tool_call>\n", [Content("a")]),
        ("hermes", '<tool_call>\n{"name": "f', []),
        ("hermes", '<tool_call>\n{"name": "f", "argu', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00', [
            CallStart(0, "f"), CallArguments(0, '{"a": "\\u00')]),
        ("hermes", f"{HERMES}\n<tool_call>", CALL),
        ("hermes", f"{HERMES}\n<tool_c", [*CALL, Content("\n<tool_c")]),
        ("llama3_json", '{"name": "f", "par', [Content('{"name": "f", "par')]),
        ("llama3_json", '{"name": "f", "parameters": {"a"', [
            CallStart(0, "f"), CallArguments(0, '{"a"')]),
        ("mistral", "[TOOL_CALLS]get_wea", []),
        ("mistral", "[TOOL_CALLS]f[ARGS]", []),
        ("pythonic", "[f(", [Content("[f(")]),
        ("pythonic", '[f(a=1, b="x', [CallStart(0, "f"), CallArguments(0, '{"a": 1, "b": "x')]),
        ("pythonic", "[f(a=1), ", CALL),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json", []),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0", []),
        ("phi4_mini_json", "import functools", [Content("import functools")]),
        ("qwen3_coder", "<function=f>\n<para", []),
        ("qwen3_coder", "<function=f>\n<parameter=a", [
            CallStart(0, "f"), CallArguments(0, "{")]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1", [
            CallStart(0, "f"), CallArguments(0, '{"a": ')]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n", [
            CallStart(0, "f"), CallArguments(0, '{"a": 1')]),
        ("text", "<function=f>\n<parameter=s>\n1\n</param", [
            CallStart(0, "f"), CallArguments(0, '{"s": "1')]),
        ("glm45", "<tool_call>f", []),
        ("glm45", "<tool_call>f\n", []),
        ("required", '[{"name": "f", "arguments": {"a"', [
            CallStart(0, "f"), CallArguments(0, '{"a"')]),
        ("named", '[{"name": "f", "arguments": {"a"', [
            CallStart(0, "f"), CallArguments(0, '{"a"')]),
    ],
)  # fmt: skip
def test_a_call_that_is_cut_stays_cut(form: str, text: str, events: list[Event]) -> None:
    """A call cut before its arguments is dropped: its markup does not become content."""
    assert parse_pieces(partial(_parser, form), text, cut=True) == events


QWEN = ("<function=f>\n<parameter=s>\n", "\n</parameter>\n", "</function>\n</tool_call>")
GLM = ("<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>")
MINIMAX = ('<invoke name="f">\n<parameter name="s">', "</parameter>\n", "</invoke>")
STRING: Functions = {"f": {"properties": {"s": {"type": "string"}}}}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("form", "tags", "value"),
    [
        ("qwen3_coder", QWEN, "<p> </parameter> </p>"),
        ("qwen3_coder", QWEN, "<x>\n</parameter>\n</x>\n"),
        ("qwen3_coder", QWEN, "</parameter></parameter>"),
        ("qwen3_coder", QWEN, "a\n</function>\nb\n</tool_call>\nc"),
        ("qwen3_coder", QWEN, "a </function></tool_call> <function=g> b"),
        ("qwen3_coder", QWEN, "</parameter>" + " " * 100 + "</function"),
        ("glm45", GLM, "a</arg_value>b</tool_call>c"),
        ("glm45", GLM, "</arg_value>\n</arg_value>"),
        ("glm45", GLM, "\n</arg_value>\n<arg_keys>\n"),
        ("minimax_m2", MINIMAX, "<p> </parameter> </p>"),
        ("minimax_m2", MINIMAX, "</invoke></minimax:tool_call>\n</parameter> <parameter>"),
    ],
)
def test_a_closing_tag_closes_a_value_only_before_the_next_tag(
    form: Form, tags: tuple[str, str, str], value: str, size: int
) -> None:
    before, behind, end = tags
    text = f"{before}{value}{behind}{end}"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    [(name, arguments)] = calls_of(parse_pieces(partial(PARSERS[form], STRING), *pieces))
    assert (name, json.loads(arguments)) == ("f", {"s": value})
    # The call is complete if the text ends after the closing tag, or if another call follows.
    for last in ("", end[: end.index(">") + 1], f"{end}\n{text}"):
        events = parse_pieces(partial(PARSERS[form], STRING), f"{before}{value}{behind}{last}")
        assert {arguments for _, arguments in calls_of(events)} == {arguments}
        assert content_of(events) == ""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1\n</function>\n</tool_call> So", ["1"]),
        ("1\n</function>", ["1"]),
        ("1</function>", ["1"]),
        ("1\n</tool_call>\n", ["1"]),
        ("1\n<parameter=n>\n2", ["1"]),
        ("1\n</function>\n<function=f>\n<parameter=s>\n2\n</function>", ["1", "2"]),
        ("1\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=s>\n2", ["1", None]),
    ],
)
def test_a_value_without_its_closing_tag(text: str, values: list[str | None]) -> None:
    events = parse_pieces(
        partial(_parser, "text"), f"<tool_call><function=f>\n<parameter=s>\n{text}"
    )
    found = [(arguments, end_call(0, arguments).state) for _, arguments in calls_of(events)]
    assert len(found) == len(values)
    for (arguments, state), value in zip(found, values, strict=True):
        if value is None or "<parameter=n>" in text:
            assert state == "open"
        else:
            assert json.loads(arguments) == {"s": value}


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
        ("deepseek_v31", [
            ("So <｜tool▁calls▁begin｜>", [Content("So")]),
            ("<｜tool▁call▁begin｜>f", []),
            ("<｜tool▁sep｜>", []),
            ('{"a', [CallStart(0, "f"), CallArguments(0, '{"a')]),
            ('": 1}', [CallArguments(0, '": 1}')]),
            ("<｜tool▁call▁end｜><｜tool▁calls▁end｜>", []),
        ]),
        ("text", [
            ("<tool_call>\n<function=f>\n", []),
            ("<parameter=", [CallStart(0, "f"), CallArguments(0, "{")]),
            ("s>\n", [CallArguments(0, '"s": ')]),
            ('a"\n', [CallArguments(0, '"a\\"')]),
            ("</b>\n", [CallArguments(0, "\\n</b>")]),
            ("</parameter>\n<parameter=n>", [CallArguments(0, '", "n": ')]),
            ("1", []),
            ("2\n</parameter>", []),
            ("\n</function>", [CallArguments(0, "12}")]),
            ("\n</tool_call>", []),
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
    parser = _parser(form)
    assert [(text, parser.parse(text)) for text, _ in pieces] == pieces


def test_calls_are_counted() -> None:
    parser = PARSERS["hermes"]()
    parser.parse(HERMES[:-40])
    assert parser.calls == 0
    parser.parse(HERMES[-40:] + HERMES)
    assert parser.calls == 2


def _seconds(form: Form, text: str) -> float:
    parser = PARSERS[form]()
    start = time.process_time()
    for position in range(0, len(text), 4):
        parser.parse(text[position : position + 4])
    parser.finish()
    return time.process_time() - start


@pytest.mark.parametrize("form", PARSERS)
def test_four_times_the_text_takes_four_times_the_time(form: Form) -> None:
    markers = PARSERS[form].markers
    unit = " ".join((*markers, *(marker[:-1] for marker in markers)))
    text = unit * (8_000 // len(unit))
    once, four = (min(_seconds(form, text * n) for _ in range(3)) for n in (1, 4))
    # Quadratic time would be 16 times.
    assert four < 9 * once


N = 50_000


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{" * N),
        ("hermes", '<tool_call>{"a": "' * N),
        ("hermes", '<tool_call>{"a": ' + "[" * N),
        ("hermes", " " * N + "<tool_call>" + " " * N),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * N),
        ("llama3_json", '{"name":{"name":' * N),
        ("deepseek_v3", "<｜" * N),
        ("glm45", "<tool_call>f<arg_key>" + "a" * N),
        ("qwen3_coder", "<function=f><parameter=a>" + "\n<" * N),
        ("text", "<function=f><parameter=s>" + "</p" * N),
        ("text", "<function=f><parameter=s>" + "</parameter>" * 2 * N),
        ("text", "<function=f><parameter=s>" + "</parameter> \n" * N),
        ("text", "<function=f><parameter=s>" + "</parameter>" + " " * N),
        ("text", "<function=f><parameter=s>" + "\n</function>\n" * N),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_value>\n<arg_" * N),
        ("mistral", "[TOOL_CALLS][" * N),
        ("pythonic", "[f(x=" + "[" * N),
        ("pythonic", "[f(x=" + "-" * N + "1)]"),
        ("pythonic", "[f(x=" + "(" * N),
        ("pythonic", "[" * N),
    ],
)
def test_long_and_deep_text_takes_time_in_proportion(form: str, text: str) -> None:
    parser = _parser(form)
    # A character costs about 0.5 us. Quadratic time would take minutes.
    with costs_less_than(10e-6 * len(text)):
        for position in range(0, len(text), 4):
            parser.parse(text[position : position + 4])
        parser.finish()
