"""Property tests of the tool call parsers with random text and chunks: no character is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.tools.events import CallStart
from gateway.parsers.tools.forced import ForcedToolParser
from gateway.parsers.tools.forms import PARSERS, Form
from tests.support.examples import scale_examples
from tests.support.tool_calls import (
    MAKERS,
    calls_of,
    content_of,
    fold,
    parse_pieces,
    piece_sizes,
    split_text,
)

pytestmark = pytest.mark.slow

# Generating an example costs more than parsing it with every format, so each example tests all.
many_examples = scale_examples(2)

# ---- Random chunk sizes

TAGS = [marker for form in PARSERS.values() for marker in form.markers]
FRAGMENTS = (
    *dict.fromkeys([*TAGS, *(tag[:-2] for tag in TAGS)]), "<function=f>", "<parameter=x>", "</",
    '<invoke name="f">', '<parameter name="x">', "function", "```json", "```", "functools", "\n<",
    "<tool_call>f\n", "functions.f:0", "True",
    '{"name": "f", ', '"arguments": ', '"parameters": ',
    '{"a": "b"}', '{"name": "g", "arguments": {}}', "{", "}", "[", "]", "(", ")", '"', "'", "\\",
    "\\u00e9", "\\ud83d", "\\ude00", "null", "1.5", ",", ";", ":", "=", " ", "\n", "f(", "x=",
    "[f(x=", "'''", "f", "<", "中", "🦉",
)  # fmt: skip
wild_text = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)


@many_examples
@given(text=wild_text, sizes=piece_sizes)
def test_the_result_does_not_depend_on_the_cuts(text: str, sizes: list[int]) -> None:
    for form, maker in MAKERS.items():
        whole = parse_pieces(maker, text)
        assert parse_pieces(maker, *split_text(text, sizes)) == whole, form
        # A forced call that was cut before its name gives no content.
        if not calls_of(whole) and not (
            form in ("required", "named", "either", "either, named")
            and text.lstrip().startswith(("[", "{"))
        ):
            assert content_of(whole) == text, form


@many_examples
@given(text=wild_text, data=st.data())
def test_what_is_out_is_never_taken_back(text: str, data: st.DataObject) -> None:
    first = text[: data.draw(st.integers(0, len(text)))]
    for form, maker in MAKERS.items():
        pushed = fold(maker().parse(first))
        whole = parse_pieces(maker, text)
        assert len(pushed) <= len(whole), form
        if pushed:
            assert pushed[:-1] == whole[: len(pushed) - 1], form
            last, longer = pushed[-1], whole[len(pushed) - 1]
            assert type(last) is type(longer), form
            if isinstance(last, CallStart) or isinstance(longer, CallStart):
                assert last == longer, form
            else:
                assert longer.text.startswith(last.text), form


# ---- Calls written by chat templates are parsed back

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


def _granite(calls: Calls, dump: Callable[[Any], str]) -> str:
    return "<|tool_call|>" + dump([{"name": n, "arguments": a} for n, a in calls])


def _phi4_mini(calls: Calls, dump: Callable[[Any], str]) -> str:
    return "functools" + dump([{"name": n, "arguments": a} for n, a in calls])


def _minimax(calls: Calls, dump: Callable[[Any], str]) -> str:
    lines = "\n".join(dump({"name": n, "arguments": a}) for n, a in calls)
    return f"<tool_calls>\n{lines}\n</tool_calls>"


def _deepseek_v3(calls: Calls, dump: Callable[[Any], str]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dump(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls, dump: Callable[[Any], str]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dump(a)}<｜tool▁call▁end｜>" for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def _kimi_k2(calls: Calls, dump: Callable[[Any], str]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dump(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


WRITERS = {
    _granite: "granite",
    _phi4_mini: "phi4_mini_json",
    _minimax: "minimax",
    _deepseek_v3: "deepseek_v3",
    _deepseek_v31: "deepseek_v31",
    _kimi_k2: "kimi_k2",
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


@many_examples
@given(calls=call_lists, dump=st.sampled_from(DUMPS), sizes=piece_sizes)
def test_calls_come_back_as_they_were_written(
    calls: Calls, dump: Callable[[Any], str], sizes: list[int]
) -> None:
    for writer, form in WRITERS.items():
        events = parse_pieces(MAKERS[form], *split_text(writer(calls, dump), sizes))
        read = [(name, json.loads(arguments)) for name, arguments in calls_of(events)]
        assert read == calls, writer
        assert content_of(events) == "", writer


def _qwen3_coder(name: str, arguments: dict[str, str]) -> str:
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


def _glm45(name: str, arguments: dict[str, str]) -> str:
    pairs = [
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{''.join(pairs)}\n</tool_call>"


def _minimax_m2(name: str, arguments: dict[str, str]) -> str:
    pairs = [f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items()]
    call = f'<invoke name="{name}">\n{"".join(pairs)}</invoke>\n'
    return f"<minimax:tool_call>\n{call}</minimax:tool_call>"


TYPED_WRITERS: dict[Form, Callable[[str, dict[str, str]], str]] = {
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "minimax_m2": _minimax_m2,
}
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


@many_examples
@given(
    calls=st.dictionaries(
        names, st.dictionaries(names, finite, max_size=3), min_size=1, max_size=3
    ),
    dump=st.sampled_from(DUMPS),
    sizes=piece_sizes,
)
def test_values_have_the_types_of_their_schema(
    calls: dict[str, dict[str, Any]], dump: Callable[[Any], str], sizes: list[int]
) -> None:
    functions = {}
    texts = {}
    for name, arguments in calls.items():
        types = {key: TYPES.get(type(value), "object") for key, value in arguments.items()}
        functions[name] = {"properties": {key: {"type": type_} for key, type_ in types.items()}}
        texts[name] = {k: v if isinstance(v, str) else dump(v) for k, v in arguments.items()}
    for form, writer in TYPED_WRITERS.items():
        written = "\n".join(writer(name, arguments) for name, arguments in texts.items())
        events = parse_pieces(partial(PARSERS[form], functions), *split_text(written, sizes))
        read = {name: json.loads(arguments) for name, arguments in calls_of(events)}
        assert read == calls, form
        assert content_of(events) == "", form


@given(calls=call_lists, sizes=piece_sizes)
def test_a_required_call_is_bare_json(calls: Calls, sizes: list[int]) -> None:
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    events = parse_pieces(ForcedToolParser, *split_text(text + "\n", sizes))
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(events)] == calls
    assert content_of(events) == ""


FORCED = '[{"name": "f", "arguments": {"a": [1]}}, {"arguments": {"b": 2}, "name": "g"}]'


@pytest.mark.parametrize(
    ("end", "calls"),
    [
        ("[", []),
        ('[{"name"', []),
        ('[{"name": "f', []),
        ('[{"name": "f",', []),
        ('"arguments": ', []),
        ('{"a": [', [("f", '{"a": [')]),
        ('{"a": [1]}}', [("f", '{"a": [1]}')]),
        ('}}, {"arg', [("f", '{"a": [1]}')]),
        ('2}, "name": "g', [("f", '{"a": [1]}')]),
        ('"name": "g"}', [("f", '{"a": [1]}'), ("g", '{"b": 2}')]),
    ],
)
def test_a_required_call_that_was_cut(end: str, calls: list[tuple[str, str]]) -> None:
    events = parse_pieces(ForcedToolParser, FORCED[: FORCED.index(end) + len(end)])
    assert calls_of(events) == calls
    assert content_of(events) == ""


NAMED = '[{"name": "f", "arguments": '


def test_no_cut_shows_the_guides_json() -> None:
    for size in range(len(FORCED) + 1):
        assert content_of(parse_pieces(ForcedToolParser, FORCED[:size])) == "", size


def test_a_forced_call_is_reported_once_its_arguments_have_begun() -> None:
    for size in range(len(NAMED) + 1):
        assert not parse_pieces(MAKERS["named"], NAMED[:size], cut=True)
    for arguments in ("{", '{"a": [1'):
        events = parse_pieces(MAKERS["named"], " \n" + NAMED + arguments, cut=True)
        assert calls_of(events) == [("f", arguments)]
        assert content_of(events) == ""
