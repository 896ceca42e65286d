"""Tool calls in the syntax of each model and in each API: streams equal complete answers.

The tests split a model's text at random points, parse it, and write the answer. A call whose
arguments were cut off must not count as a call.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.anthropic.answers import MessageAnswer
from gateway.api.openai.answers import OpenAIAnswer
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.chats import ResponsesChat, parse
from gateway.api.responses.requests import ResponseRequest
from gateway.deltas import TextDelta
from gateway.parsers.message import MessageForm, MessageReader
from gateway.parsers.tools.arguments import end_call
from gateway.parsers.tools.forced import ForcedCall
from gateway.parsers.tools.forms import PARSERS
from gateway.tokenization.stop_strings import StopStrings
from gateway.tokenization.text_stream import with_events
from tests.support.answers_read import Written, chat_choice_of, message_of, response_of
from tests.support.generations import batch
from tests.support.tool_calls import piece_sizes, split_text

STRING = {"properties": {"a": {"type": "string"}}}
QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">%s</parameter>\n</invoke>'
TEXTS: dict[str, str] = {
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "%s"}\n```',
    "deepseek_v31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "%s"}<｜tool▁call▁end｜>',
    "glm45": GLM,
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "%s"}}]',
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "%s"}}\n</tool_call>',
    "kimi_k2": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "%s"}',
    "llama3_json": '{"name": "f", "parameters": {"a": "%s"}}',
    "minimax": '<tool_calls>\n{"name": "f", "arguments": {"a": "%s"}}\n</tool_calls>',
    "minimax_m2": MINIMAX,
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "%s"}',
    "openai": '<|channel|>commentary to=functions.f<|message|>{"a": "%s"}<|call|>',
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"a": "%s"}}]',
    "pythonic": '[f(a="%s")]',
    "qwen3_coder": QWEN,
    "required": '[{"name": "f", "arguments": {"a": "%s"}}]',
}
HOSTILE = (
    "</parameter>", "</function>", "</tool_call>", "</arg_value>", "</invoke>", "\n", " ", '"', "'",
    "\\", "\\ud83d", "\\ude00", "\\u00", "\\u00e9", '"}', "}", "{", "NaN", "tru", "a", "中", "🦉",
    "<p> </parameter> </p>", "<parameter=b>", "<tool_call>", "<|call|>", "<｜tool▁call▁end｜>",
)  # fmt: skip


def _form(name: str, custom: Collection[str] = ()) -> MessageForm:
    if name == "required":
        return MessageForm(guided=ForcedCall())
    channel = "" if name == "openai" else None
    return MessageForm(
        tools=name,  # type: ignore[arg-type]
        functions={"f": STRING},
        custom=custom,
        channel=channel,
    )


def _deltas(
    name: str, pieces: list[str], finish: Any, stop: tuple[str, ...], custom: Collection[str] = ()
) -> list[TextDelta]:
    reader, stops = MessageReader(_form(name, custom)), StopStrings(stop)
    deltas: list[TextDelta] = []
    for number, piece in enumerate(pieces, 1):
        text, stopped = stops.split_at_stop(piece)
        ended = "stop" if stopped is not None else None
        deltas.append(with_events(reader, TextDelta(text, number, ended, stop=stopped)))
        if deltas[-1].finish is not None:
            return deltas
    last = TextDelta(stops.flush(), len(pieces), finish)
    return [*deltas, with_events(reader, last)]


def _chat(deltas: list[TextDelta], custom: Collection[str] = ()) -> dict[str, Any]:
    """Return the choice of the complete chat answer. Assert that the streamed choice equals it."""
    answer, body = OpenAIAnswer("chat", "m", batch(), custom=custom), Written()
    sink = answer.stream(body, "none")
    for delta in deltas:
        sink.accept(0, delta)
    streamed = chat_choice_of(body.data)
    [whole] = json.loads(answer.build_complete([deltas], num_returned=None))["choices"]
    assert whole["finish_reason"] == streamed["finish_reason"]
    assert whole["message"]["content"] == streamed["content"]
    assert whole["message"].get("tool_calls", []) == streamed["tool_calls"]
    return dict(whole)


def _response(deltas: list[TextDelta], custom: Collection[str] = ()) -> dict[str, Any]:
    """Return the complete response. Assert that the streamed response equals it."""
    tools = [{"type": "custom", "name": name} for name in custom]
    body = orjson.dumps({"model": "m", "input": "?", "tools": tools})
    chat = cast(ResponsesChat, parse(ResponseRequest, body).request)
    assert chat.plain_text_tools == {*custom}
    answer = ResponseAnswer(cast(Any, None), chat, batch())
    written = Written()
    sink = answer.stream(written, "last")
    for delta in deltas:
        sink.accept(0, delta)
    streamed = response_of(written.data)
    found = json.loads(answer.build_complete([deltas], num_returned=None))
    for response in (streamed, found):
        response["completed_at"] = bool(response["completed_at"])
    assert streamed == found
    return dict(found)


def _message(deltas: list[TextDelta]) -> dict[str, Any]:
    """Return the complete message. Assert that the streamed message equals it."""
    answer, body = MessageAnswer("m", batch(), max_tokens=1), Written()
    sink = answer.stream(body, "last")
    for delta in deltas:
        sink.accept(0, delta)
    found = json.loads(answer.build_complete([deltas], num_returned=None))
    assert message_of(body.data) == found
    return dict(found)


def _agree(deltas: list[TextDelta]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the answers of the three APIs. Assert that all treat tool calls alike."""
    chat, response, message = (of([replace(delta) for delta in deltas])
                               for of in (_chat, _response, _message))  # fmt: skip
    calls = [call["function"]["arguments"] for call in chat["message"].get("tool_calls", ())]
    complete = [arguments for arguments in calls if end_call(0, arguments).state == "complete"]
    items = [item for item in response["output"] if item["type"] == "function_call"]
    assert [item["arguments"] for item in items] == calls
    assert all(calls)
    uses = [block["input"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(uses) == len(complete)
    for item in items[:-1] if chat["finish_reason"] == "length" else items:
        assert (item["status"] == "completed") == (item["arguments"] in complete)
    if chat["finish_reason"] == "tool_calls":
        assert calls[-1] in complete
    assert (message["stop_reason"] == "tool_use") <= (chat["finish_reason"] == "tool_calls")
    return chat, response, message


values = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=2), max_size=6).map("".join)


@pytest.mark.slow
@given(
    value=values,
    sizes=piece_sizes,
    data=st.data(),
    finish=st.sampled_from(["stop", "length"]),
    stop=st.sampled_from([(), ("{",), ('"',), ("</",), ("a",)]),
)
def test_a_streamed_answer_is_the_whole_one(
    value: str, sizes: list[int], data: st.DataObject, finish: Any, stop: tuple[str, ...]
) -> None:
    value = value.encode(errors="replace").decode()
    for name, text in TEXTS.items():
        written = "So. " * (name not in ("required", "pythonic")) + text.replace("%s", value)
        size = data.draw(st.integers(0, len(written))) if data.draw(st.booleans()) else len(written)
        _agree(_deltas(name, list(split_text(written[:size], sizes)), finish, stop))


def test_every_form_is_tried() -> None:
    assert TEXTS.keys() == {*PARSERS, "openai", "required"}


@pytest.mark.parametrize("name", TEXTS)
def test_every_cut(name: str) -> None:
    """Only a complete call counts if the text ends at a limit, a stop string or the model's end."""
    written = TEXTS[name].replace("%s", "b c")
    for size in range(len(written) + 1):
        for finish, stop in (("length", ()), ("stop", ()), ("stop", ("\x00",))):
            text = written[:size] + "".join(stop)
            chat, response, message = _agree(_deltas(name, [text], finish, stop))
            calls = chat["message"].get("tool_calls", [])
            whole = [json.loads(c["function"]["arguments"]) for c in calls
                     if end_call(0, c["function"]["arguments"]).state == "complete"]  # fmt: skip
            assert whole in ([], [{"a": "b c"}])
            if calls and not whole:
                assert chat["finish_reason"] == finish
                assert response["status"] == response["output"][-1]["status"] == "incomplete"
                reason = {"length": "max_tokens", "stop": "end_turn"}[finish]
                assert message["stop_reason"] == ("stop_sequence" if stop else reason)
            elif calls and finish == "stop":
                assert chat["finish_reason"] == "tool_calls"
                assert response["status"] == "completed"


HERMES = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize("arguments", ['{"a": tru}', '{"$schema#", "a": 1}', "{'a': 1}"])
def test_a_call_with_an_error_in_its_arguments(arguments: str) -> None:
    """Chat and Responses pass the raw arguments on. Messages has a text block, not a `tool_use`."""
    chat, response, message = _agree(_deltas("hermes", [HERMES % arguments], "stop", ()))
    [call] = chat["message"]["tool_calls"]
    assert (call["function"]["arguments"], chat["finish_reason"]) == (arguments, "stop")
    [item] = response["output"]
    # The model ended the response itself, so only the call is incomplete.
    assert (item["status"], response["status"]) == ("incomplete", "completed")
    [block] = message["content"]
    assert (block["type"], message["stop_reason"]) == ("text", "end_turn")
    assert arguments in block["text"]


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        (HERMES % '{"a": "\\ud83d"}', {"a": "\ufffd"}),
        (HERMES % '{"a\\ude00": "\\ud83d\\ud83d\\ude00\\\\ud83d"}', {"a\ufffd": "\ufffd😀\\ud83d"}),
        (HERMES % '"{\\"a\\": \\"\\ud83d\\"}"', {"a": "\ufffd"}),
        (HERMES.replace("%s}", '{"a": [{"b": 1'), {"a": [{"b": 1}]}),
        ('[f(a="\\ud83d")]', {"a": "\ufffd"}),
    ],
)
def test_what_is_repaired(text: str, repaired: Any) -> None:
    for size in range(1, 9):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        form = "pythonic" if text[0] == "[" else "hermes"
        chat, response, message = _agree(_deltas(form, pieces, "stop", ()))
        [block] = message["content"]
        assert block["input"] == repaired
        assert chat["finish_reason"] == "tool_calls"
        assert response["output"][0]["status"] == "completed"


RAW = "<|channel|>commentary to=functions.f<|message|>%s"
INPUTS = {"*** Begin Patch": "*** Begin Patch", "{not} JSON": "{not} JSON", '{"input": "x"}': "x"}


@pytest.mark.parametrize("size", [1, 7, 999])
@pytest.mark.parametrize("arguments", INPUTS)
def test_a_custom_tool_may_be_called_with_its_input_itself(arguments: str, size: int) -> None:
    written = RAW % arguments
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    chat, response = _custom(_deltas("openai", pieces, "stop", (), {"f"}))
    [call] = chat["message"]["tool_calls"]
    assert (call["custom"]["input"], chat["finish_reason"]) == (INPUTS[arguments], "tool_calls")
    [item] = response["output"]
    assert (item["input"], item["status"]) == (INPUTS[arguments], "completed")
    assert response["status"] == "completed"


@pytest.mark.parametrize(
    ("arguments", "finish", "stop"),
    [
        ("*** Begin", "length", ()),
        ("*** Begin", "stop", ("gin",)),  # the stop string cut the input off
        ("{not} JSON", "stop", ("JSON",)),
        ('{"input": "x', "stop", ()),
        ('{"input": "x"}', "length", ()),
    ],
)
def test_a_custom_tool_is_not_called_with_a_part_of_its_input(
    arguments: str, finish: str, stop: tuple[str, ...]
) -> None:
    chat, response = _custom(_deltas("openai", [RAW % arguments], finish, stop, {"f"}))
    assert chat["finish_reason"] == finish
    assert response["status"] == response["output"][-1]["status"] == "incomplete"


def _custom(deltas: list[TextDelta]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the chat's choice and the response, with `f` as a custom tool."""
    copies = ([replace(delta) for delta in deltas] for _ in range(2))
    return _chat(next(copies), {"f"}), _response(next(copies), {"f"})


def test_a_stop_string_leaves_no_markup_as_content() -> None:
    chat, _, _ = _agree(_deltas("hermes", [HERMES % "{}"], "stop", ("{",)))
    assert (chat["message"]["content"], chat["finish_reason"]) == (None, "stop")
    assert "tool_calls" not in chat["message"]


@pytest.mark.parametrize(("parallel", "most"), [(True, 8), (False, 1)])
def test_required_calls_have_an_upper_bound(parallel: bool, most: int) -> None:
    """The gateway ends an answer with more calls than allowed, if the engine ignores the guide."""
    reader = MessageReader(MessageForm(guided=ForcedCall(), parallel=parallel))
    call = '{"name": "f", "arguments": {}}'
    deltas: list[TextDelta] = []
    for number, piece in enumerate(["[", *[f"{call}, "] * 100]):
        deltas.append(with_events(reader, TextDelta(piece, number)))
        if deltas[-1].finish is not None:
            break
    chat, _, _ = _agree(deltas)
    assert len(chat["message"]["tool_calls"]) == most
    assert chat["finish_reason"] == "tool_calls"
    assert len(deltas) == most + 2
