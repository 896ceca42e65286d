"""The Messages API: requests become chats, and generated deltas become content blocks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from gateway.api.anthropic.answers import ANTHROPIC, MessageAnswer
from gateway.api.anthropic.requests import MessagesChat, MessagesRequest, parse
from gateway.api.openai.messages import ToolCall
from gateway.config.tenants import new_key
from gateway.deltas import EngineStats, TextDelta
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import Content, Reasoning
from tests.support.answers_read import Written, message_of
from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.generations import batch
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.tool_calls import call_events

QUESTION = {"role": "user", "content": "Hi"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
REDACTED = {"role": "assistant", "content": [{"type": "redacted_thinking"}]}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "1"}


def chat(**fields: Any) -> MessagesChat:
    body = {"model": "m", "max_tokens": 8, "messages": [QUESTION]} | fields
    return parse(MessagesRequest, orjson.dumps(body)).request


def said(*messages: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(m.role, m.content) for m in chat(messages=list(messages)).messages]


def test_results_of_tools_are_messages_of_their_own_in_their_place() -> None:
    spoken = {"type": "text", "text": "let me see"}
    results = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
        {"type": "text", "text": "after"},
    ]
    found = chat(
        messages=[
            QUESTION,
            {"role": "assistant", "content": [THOUGHT, spoken, USE, USE | {"id": "t2"}]},
            {"role": "user", "content": results},
        ]
    ).messages
    assert [(m.role, m.content) for m in found] == [
        ("user", "Hi"),
        ("assistant", "let me see"),
        ("user", "before"),
        ("tool", "1"),
        ("tool", "Error: no"),
        ("user", "after"),
    ]
    assert found[1].reasoning_content == "hm"
    call = (found[1].tool_calls or [])[0]
    assert isinstance(call, ToolCall)
    assert isinstance(call.function.arguments, str)
    assert (call.id, json.loads(call.function.arguments)) == ("t1", {"a": 1})
    assert [m.tool_call_id for m in found[3:5]] == ["t1", "t2"]


def test_messages_of_one_side_are_one_turn() -> None:
    reminder = {"role": "user", "content": [{"type": "text", "text": "be kind"}]}
    answers = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert said(QUESTION, reminder, *answers, QUESTION) == [
        ("user", "Hi\nbe kind"),
        ("assistant", "a\nb"),
        ("user", "Hi"),
    ]


def test_the_system_prompt_comes_first() -> None:
    blocks = [{"type": "text", "text": text} for text in ("one", "two")]
    assert [m.content for m in chat(system=blocks).messages] == ["one\ntwo", "Hi"]


def test_an_answer_that_was_begun_goes_on() -> None:
    begun = chat(messages=[QUESTION, {"role": "assistant", "content": "It is"}])
    assert (begun.continue_final_message, begun.add_generation_prompt) == (True, False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools.0.name"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"container": "c"}, "container"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": [THOUGHT]}]}, "messages.0.content.0"),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": [RESULT]}]},
            "messages.1.content.0",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": [USE]}]},
            "messages",
        ),
        ({"system": [{"type": "text", "text": 1}]}, "system.0.text"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            "messages",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named}: "):
        chat(**fields)


def test_hints_are_refused_where_the_operator_says_so() -> None:
    body = orjson.dumps(
        {"model": "m", "max_tokens": 8, "messages": [QUESTION], "context_management": {"edits": []}}
    )
    assert parse(MessagesRequest, body).hints == ("context_management",)
    tools = [{"name": "f", "input_schema": {}, "strict": True}]
    wish = orjson.dumps({"model": "m", "max_tokens": 8, "messages": [QUESTION], "tools": tools})
    assert parse(MessagesRequest, wish).hints == ("tools.strict",)
    with pytest.raises(UnsupportedParameter, match="context_management"):
        parse(MessagesRequest, body, strict=True)
    form = {"format": {"type": "json_schema", "schema": {}}}
    fields = {"tools": [{"name": "f", "input_schema": {}}], "output_config": form}
    beside = orjson.dumps({"model": "m", "max_tokens": 8, "messages": [QUESTION]} | fields)
    with pytest.raises(UnsupportedParameter, match=r"^tools: "):
        parse(MessagesRequest, beside, strict=True)


def answer(**fields: Any) -> MessageAnswer:
    return MessageAnswer("m", batch(prompt_tokens=100), **{"max_tokens": 1} | fields)


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def messages(draw: st.DrawFn) -> list[list[MessageEvent]]:
    """Draw the events of a message, split into deltas at random points."""
    events: list[MessageEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=6)):
        if kind == "call":
            arguments = json.dumps({"a": draw(texts)}, ensure_ascii=False)
            at = draw(st.integers(0, len(arguments)))
            pieces = arguments[:at], arguments[at:]
            events += call_events("f", *pieces, index=calls, call_id=f"id{calls}")
            calls += 1
        else:
            event = Content if kind == "text" else Reasoning
            events += [event(draw(texts)) for _ in range(draw(st.integers(1, 3)))]
    deltas: list[list[MessageEvent]] = [[]]
    for event_ in events:
        if draw(st.booleans()):
            deltas.append([])
        deltas[-1].append(event_)
    return deltas


@given(messages(), st.sampled_from(["stop", "length"]), st.sampled_from([None, "END"]))
def test_a_stream_is_the_whole_answer(
    events: list[list[MessageEvent]], finish: Any, stop: str | None
) -> None:
    deltas = [TextDelta("", n + 1, events=tuple(own)) for n, own in enumerate(events)]
    stats = EngineStats(reused_tokens=64)
    deltas.append(TextDelta("", len(deltas), finish, stats, events=(), stop=stop))
    body = Written()
    sink = answer().stream(body, "last")
    for delta in deltas:
        sink.accept(0, delta)
    streamed = message_of(body.data)
    whole = json.loads(answer().build_complete([deltas], num_returned=None))
    assert streamed == whole
    assert whole["usage"]["input_tokens"] == 100 - 64
    assert whole["usage"]["cache_read_input_tokens"] == 64


@given(st.lists(texts, max_size=8))
def test_plain_text_is_one_block(pieces: list[str]) -> None:
    deltas = [TextDelta(text, n + 1) for n, text in enumerate(pieces)]
    deltas.append(TextDelta("", len(deltas), "stop"))
    body = Written()
    sink = answer().stream(body, "last")
    for delta in deltas:
        sink.accept(0, delta)
    message = message_of(body.data)
    text = "".join(pieces)
    assert message["content"] == ([{"type": "text", "text": text}] if text else [])
    assert message == json.loads(answer().build_complete([deltas], num_returned=None))


@pytest.mark.parametrize(
    ("arguments", "finish", "text"),
    [
        ('{"city": "Paris", "day": "Mon', "length", '{"city": "Paris", "day": "Mon'),
        ('{"a": tru}', "stop", '{"a": tru}}'),
        ('{"$schema#", "a": 1}', "stop", '{"$schema#", "a": 1}}'),
        ("[1]", "stop", "[1]}"),
        ('{"x": 1.0, "y": NaN', "stop", '{"x": 1.0, "y": NaN'),
        ("[" * 100_000, "stop", "[" * 100_000),
    ],
)
def test_a_call_that_is_no_object_is_text(arguments: str, finish: Any, text: str) -> None:
    events = (Content("So"), *call_events("f", arguments))
    body = Written()
    deltas = [TextDelta("", 9, finish, events=events)]
    answer().stream(body, "last").accept(0, deltas[0])
    message = json.loads(answer().build_complete([deltas], num_returned=None))
    assert message == message_of(body.data)
    assert message["content"] == [
        {"type": "text", "text": f'So\n{{"name": "f", "arguments": {text}'}
    ]
    assert message["stop_reason"] == ("end_turn" if finish == "stop" else "max_tokens")


def test_the_arguments_of_a_call_are_passed_on_as_they_were_written() -> None:
    arguments = '{"x": 123456789012345678901234567890, "y": 1.10}'
    events = tuple(call_events("f", arguments))
    told = answer().build_complete([[TextDelta("", 9, "stop", events=events)]], num_returned=None)
    assert arguments.encode() in told
    assert json.loads(told)["stop_reason"] == "tool_use"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_json_has_no_number_for_is_null_in_a_call(number: str) -> None:
    """NaN and infinities become null, because most clients' JSON parsers reject them."""
    events = tuple(call_events("f", f'{{"x": [1, {number}]}}'))
    told = answer().build_complete([[TextDelta("", 9, "stop", events=events)]], num_returned=None)
    [block] = orjson.loads(told)["content"]
    assert block["input"] == {"x": [1, None]}


def test_what_a_message_costs_grows_with_its_length_alone() -> None:
    """Joining many messages of one role, or many deltas, takes linear time."""

    def cost(size: int) -> float:
        body = {"role": "user", "content": "🦉" + "x" * 2000}
        request = orjson.dumps({"model": "m", "max_tokens": 8, "messages": [body] * (size // 16)})
        deltas = [TextDelta("", 1, events=(Content("x" * 8),))] * (size * 8)
        deltas.append(TextDelta("", 1, "stop", events=()))
        began = time.thread_time()
        parse(MessagesRequest, request)
        answer().build_complete([deltas], num_returned=None)
        return time.thread_time() - began

    small, large = (min(cost(size) for _ in range(3)) for size in (2**11, 2**14))
    assert large < 24 * small  # 8 for linear cost, 64 for quadratic cost


def test_thoughts_are_left_out_where_nobody_wants_them() -> None:
    deltas = [TextDelta("", 3, "stop", events=(Reasoning("secret"), Content("open")))]
    told = answer(omit_thinking=True).build_complete([deltas], num_returned=None)
    assert b"secret" not in told
    assert [block["type"] for block in json.loads(told)["content"]] == ["thinking", "text"]


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


BODY = {"model": "m", "max_tokens": 9, "messages": [QUESTION]}


@pytest.mark.parametrize(
    ("fault", "kind"), [(None, None), ("abort", "api_error"), ("stall", "timeout_error")]
)
async def test_an_error_in_a_stream_is_its_last_event(
    folder: Path, fault: Fault | None, kind: str | None
) -> None:
    clock = EventClock()
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=fault, step=2)
    async with serving(servicer) as endpoint, running(folder, endpoint) as (client, _, _):
        asked = client.post("/v1/messages", json=BODY | {"stream": True}, timeout=None)
        stalls = lambda: fault == "stall" and servicer.reached > 0  # noqa: E731
        told: httpx.Response = await clock.leap_once(stalls, asked)
    last = list(SSEDecoder().iter_bytes(iter([told.content])))[-1]
    assert told.status_code == 200
    if kind is None:
        assert last.event == "message_stop"
    else:
        assert last.event == "error"
        assert last.json()["error"]["type"] == kind
    assert "[DONE]" not in told.text


async def test_who_asks_is_told_by_either_header(folder: Path) -> None:
    key = new_key()
    config = write_config(folder / "gateway.yaml", tenant("a", key))
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, config=config) as (client, _, _),
    ):
        for headers, status in (
            ({"x-api-key": key}, 200),
            ({"authorization": f"Bearer {key}"}, 200),
            ({"x-api-key": key + "x"}, 401),
            ({}, 401),
            # A client may send another server's key in one header. The valid key then counts.
            ({"x-api-key": key, "authorization": "Bearer sk-of-another-server"}, 200),
            ({"x-api-key": key, "authorization": "Basic dTpw"}, 200),
            ({"x-api-key": key, "authorization": f"Bearer {'x' * 600}"}, 200),
            ({"x-api-key": "sk-of-another-server", "authorization": f"Bearer {key}"}, 200),
            ({"x-api-key": key + "x", "authorization": "Bearer sk-of-another-server"}, 401),
        ):
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                body = BODY if path == "/v1/messages" else {"model": "m", "messages": [QUESTION]}
                told = await client.post(path, json=body, headers=headers)
                assert told.status_code == status, told.text
                if status == 401:
                    assert told.json()["error"]["type"] == "authentication_error"
        for scheme in ("", "Basic ", "Bearer"):
            headers = {"authorization": scheme + key}
            told = await client.post("/v1/messages", json=BODY, headers=headers)
            assert told.status_code == 401
            message = told.json()["error"]["message"]
            assert message.startswith("The header `Authorization` does not have the form `Bearer")
            assert key not in message
        listed = await client.get("/v1/models", headers={"x-api-key": key})
        assert listed.status_code == 200


@pytest.mark.parametrize("limit", [0, 0.0])
async def test_without_output_the_prompt_is_computed_and_nothing_is_answered(
    folder: Path, limit: float
) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, "hello hello"), fault=None, step=0)
    async with serving(servicer) as endpoint, running(folder, endpoint) as (client, _, _):
        whole = await client.post("/v1/messages", json=BODY | {"max_tokens": limit})
        body = BODY | {"max_tokens": limit, "stream": True}
        streamed = await client.post("/v1/messages", json=body)
    assert whole.status_code == 200, whole.text
    message = whole.json()
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] > 0
    again = message_of(streamed.content)
    assert (again["content"], again["stop_reason"]) == ([], "max_tokens")
    assert len(servicer.requests) == 2


@pytest.mark.parametrize("limit", [-1, False])
def test_other_limits_below_one_name_the_range(limit: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: Input should be"):
        parse(MessagesRequest, orjson.dumps(BODY | {"max_tokens": limit}))


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_reminder_is_the_users_where_the_template_takes_no_system_message(
    folder: Path, refuses: bool
) -> None:
    template = (
        "{% for m in messages %}"
        f"{{% if {refuses} and m.role == 'system' and not loop.first %}}"
        "{{ raise_exception('no') }}{% endif %}{{ m.role }}>{{ m.content }}|{% endfor %}"
    )
    config = {"eos_token": "!", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reminder = {"role": "system", "content": "be kind"}
    body = {"model": "m", "system": "one", "messages": [QUESTION, reminder, QUESTION]}
    alone = {"model": "m", "messages": [QUESTION, reminder]}
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, max_seq_len=512) as (client, _, _),
    ):
        for asked, apart, joined in (
            (
                body,
                "system>one|user>Hi|system>be kind|user>Hi|",
                "system>one|user>Hi\nbe kind\nHi|",
            ),
            (alone, "user>Hi|system>be kind|", "user>Hi\nbe kind|"),
        ):
            told = await client.post("/v1/messages", json=asked | {"max_tokens": 9})
            counted = await client.post("/v1/messages/count_tokens", json=asked)
            assert told.status_code == counted.status_code == 200, told.text
            # This tokenizer makes one token of each character.
            tokens = len(joined if refuses else apart)
            assert counted.json()["input_tokens"] == tokens
            assert told.json()["usage"]["input_tokens"] == tokens


async def test_any_failure_of_these_paths_is_in_the_envelope(folder: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=None, step=0)
    async with serving(servicer) as endpoint, running(folder, endpoint) as (client, _, _):
        for told in (
            await client.get("/v1/messages"),
            await client.post("/v1/messages/batches", json={}),
            await client.post("/v1/messages", content=b"{", headers={"content-type": "text/xml"}),
        ):
            assert told.status_code in (404, 405, 415)
            assert told.json()["type"] == "error"
        other = await client.post("/v1/messagesx", json={})
        assert "type" not in other.json()


def test_a_ping_is_what_goes_out_while_nothing_else_does() -> None:
    [ping] = SSEDecoder().iter_bytes(iter([ANTHROPIC.keep_alive]))
    assert (ping.event, ping.json()) == ("ping", {"type": "ping"})
