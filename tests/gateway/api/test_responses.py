"""The Responses API: requests become chats, and generated deltas become output items."""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from tokenizers import Tokenizer

from gateway.api.openai.system_messages import render_prompt
from gateway.api.responses.chats import parse
from gateway.api.responses.items import decode_thoughts, encode_thoughts
from gateway.api.responses.requests import ResponseRequest
from gateway.deltas import EngineStats, TextDelta
from gateway.errors import EngineUnavailable, InvalidRequest, UnsupportedParameter
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import Content, Reasoning
from gateway.tokenization.chat_format import ChatFormat
from tests.support.answers_read import EVENT, Written
from tests.support.cpu import costs_less_than
from tests.support.fake_triton import FakeTriton, Fault, serving
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.patience import PATIENCE_S
from tests.support.response_streams import (
    FUNCTION,
    PATCH,
    QUESTION,
    answer,
    answer_to,
    chat,
    complete_answer,
    stream_answer,
)
from tests.support.tool_calls import call_events

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "1"}
THOUGHT = {
    "type": "reasoning",
    "id": "r",
    "summary": [{"type": "summary_text", "text": "in short"}],
}
FULL = THOUGHT | {"content": [{"type": "reasoning_text", "text": "hm"}]}


def said(*items: Any, **fields: Any) -> list[tuple[str, Any]]:
    return [(m.role, m.content) for m in chat(input=list(items), **fields).messages]


def test_an_assistants_thoughts_words_and_calls_are_one_message() -> None:
    spoken = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I see"}],
    }
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "x\n"}
    noted = {
        "type": "custom_tool_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
    }
    found = chat(input=[QUESTION, FULL, spoken, CALL, custom, RESULT, noted, QUESTION]).messages
    assert [(m.role, m.content) for m in found] == [
        ("user", "Hi"),
        ("assistant", "I see"),
        ("tool", "1"),
        ("tool", "a\nb"),
        ("user", "Hi"),
    ]
    assert found[1].reasoning_content == "hm"
    calls = [
        (call.id, call.function.name, call.function.arguments) for call in found[1].tool_calls or []
    ]
    assert calls == [("c1", "f", '{"a": 1}'), ("c2", "note", '{"input":"x\\n"}')]
    assert [m.tool_call_id for m in found[2:4]] == ["c1", "c2"]


def test_instructions_and_what_leads_are_one_system_message() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "two"}]}
    system = {"type": "message", "role": "system", "content": "three"}
    assert said(developer, system, QUESTION, developer, instructions="one") == [
        ("system", "one\ntwo\nthree"),
        ("user", "Hi"),
        ("system", "two"),
    ]


@pytest.mark.parametrize(
    ("item", "thoughts"),
    [
        (FULL, "hm"),
        (THOUGHT | {"encrypted_content": encode_thoughts("hm 🦉")}, "hm 🦉"),
        (THOUGHT | {"encrypted_content": "gAAAAABanothers"}, "in short"),
        (THOUGHT | {"encrypted_content": "thoughts:=="}, "in short"),
        (THOUGHT, "in short"),
    ],
)
def test_thoughts_come_back_in_whatever_they_were_told(item: Any, thoughts: str) -> None:
    answer = {"role": "assistant", "content": "ok"}
    assert chat(input=[QUESTION, item, answer, QUESTION]).messages[1].reasoning_content == thoughts


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_what_is_encoded_can_be_read(text: str) -> None:
    assert decode_thoughts(encode_thoughts(text)) == text


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    wanted = chat(tools=[FUNCTION, PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    function = (wanted.tools or [])[1].function
    assert function.description == (
        'Edits files\n\nThe input must match this grammar (lark):\nstart: "x"'
    )
    assert function.parameters is not None
    assert function.parameters["required"] == ["input"]
    assert wanted.forced_call is not None
    assert wanted.forced_call.name == "apply_patch"


def test_too_many_messages_are_counted_with_those_before() -> None:
    said = [QUESTION, {"role": "assistant", "content": "x"}] * 1024
    assert len(chat(input=said).messages) == 2048
    with pytest.raises(InvalidRequest, match="2049 messages"):
        chat(input=said, instructions="I")


def test_allowed_tools_are_those_that_are_offered() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "f"}],
    }
    wanted = chat(tools=[PATCH, FUNCTION], tool_choice=allowed)
    assert [tool.function.name for tool in wanted.tools or []] == ["f"]
    assert wanted.tool_choice == "required"
    assert [name for _, name in wanted.build_guide_parts()] == ["tools[1].parameters"]


def test_formats_are_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"enum": [1]}, "strict": True}
    wanted = chat(text={"format": form}).response_format
    assert wanted is not None
    assert wanted.json_schema is not None
    assert (wanted.json_schema.name, wanted.json_schema.schema_) == ("n", {"enum": [1]})


@pytest.mark.parametrize(
    "said", [[QUESTION, RESULT], [CALL, RESULT | {"call_id": "c2"}], [QUESTION, RESULT, CALL]]
)
def test_an_output_without_its_call_is_refused_by_its_place(said: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"no call 'c\d' comes before") as refused:
        chat(input=said)
    assert refused.value.param == "input[1].call_id"


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
@pytest.mark.parametrize("place", ["content", "output"])
def test_parts_that_are_no_text_are_refused_by_their_place(kind: str, place: str) -> None:
    parts = [{"type": "input_text", "text": "look"}, {"type": kind}]
    item = QUESTION | {"content": parts} if place == "content" else RESULT | {"output": parts}
    with pytest.raises(UnsupportedParameter, match=kind) as refused:
        chat(input=[QUESTION, item])
    assert refused.value.param == f"input[1].{place}[1]"


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_call", "file_search_call", "computer_call", "computer_call_output"),
        *("code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_response"),
        *("image_generation_call", "local_shell_call", "shell_call", "apply_patch_call"),
        *("compaction", "new_one"),
    ],
)
def test_items_of_hosted_tools_are_refused_by_their_place(kind: str) -> None:
    with pytest.raises(UnsupportedParameter, match=kind) as refused:
        chat(input=[QUESTION, {"type": kind, "id": "x"}])
    assert refused.value.param == "input[1]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        (
            {"input": [QUESTION, {"role": "user", "content": [{"type": "input_text"}]}]},
            "input[1].content[0].text",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [CALL | {"namespace": 5}]}, "input[0].namespace"),
        ({"tools": [FUNCTION, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [FUNCTION | {"name": "f g"}]}, "tools[0].name"),
        ({"tools": [PATCH | {"format": {"type": "x"}}]}, "tools[0].format"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tools"),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["message.output_text.logprobs", "x"]}, "include[1]"),
        ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 65),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"truncation": "middle"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [FUNCTION, FUNCTION, PATCH | {"name": "f"}]}, "tools[2].name"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        (
            {"tools": [FUNCTION | {"allowed_callers": ["programmatic"]}]},
            "tools[0].allowed_callers",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields).build_guide()
    assert refused.value.param == param
    assert refused.value.message.startswith((f"{param}: ", "tool_choice forces", "You must"))


@pytest.mark.parametrize("name", ["min_p", "messages", "max_tokens", "response_format"])
def test_a_parameter_of_another_protocol_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match=f"^{name} is not (supported|a parameter)"):
        chat(**{name: "anything"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "auto", "message"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "id", "text", "name", "output", "tools"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
WELL: dict[str, Any] = {
    "instructions": "I",
    "input": [QUESTION, FULL, CALL, RESULT],
    "tools": [FUNCTION, PATCH],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
}


@given(st.data())
def test_whatever_is_sent_is_read_or_refused_by_name(data: st.DataObject) -> None:
    body = json.loads(json.dumps(WELL))
    at: Any = body
    while True:
        places = list(at) if isinstance(at, dict) else range(len(at))
        place = data.draw(st.sampled_from(sorted(places, key=str)))
        deeper = isinstance(at[place], dict | list) and at[place]
        if not deeper or data.draw(st.booleans()):
            break
        at = at[place]
    at[place] = data.draw(JSON)
    refused = None
    try:
        chat(**body).build_guide()
    except InvalidRequest as error:
        refused = error
    assert refused is None or (refused.param and "[other]" not in refused.message)


def test_hints_are_refused_where_the_operator_says_so() -> None:
    wish = FUNCTION | {"strict": True}
    body = {
        "model": "m",
        "input": "Hi",
        "text": {"verbosity": "low"},
        "reasoning": {"context": "all_turns"},
        "tools": [PATCH, wish],
        "context_management": [{"type": "compaction"}],
    }
    hints = parse(ResponseRequest, orjson.dumps(body)).hints
    assert hints == (
        *("text.verbosity", "reasoning.context", "context_management", "tools.format"),
        "tools.strict",
    )
    with pytest.raises(UnsupportedParameter, match=r"text\.verbosity"):
        parse(ResponseRequest, orjson.dumps(body), strict=True)


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def messages(draw: st.DrawFn) -> list[list[MessageEvent]]:
    """Draw the events of a message, split into deltas at random points."""
    events: list[MessageEvent] = []
    calls = 0
    kinds = ["text", "thought", "call", "custom"]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=6)):
        if kind in ("call", "custom"):
            name = "f" if kind == "call" else "apply_patch"
            arguments = json.dumps({"input": draw(texts)}, ensure_ascii=False)
            at = draw(st.integers(0, len(arguments)))
            pieces = arguments[:at], arguments[at:]
            events += call_events(name, *pieces, index=calls, call_id=f"id{calls}")
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


def _timeless(response: dict[str, Any]) -> dict[str, Any]:
    return response | {"created_at": 0, "completed_at": response["completed_at"] is not None}


@given(messages(), st.sampled_from(["stop", "length"]), st.booleans())
def test_a_stream_is_the_whole_answer(
    events: list[list[MessageEvent]], finish: Any, summarized: bool
) -> None:
    deltas = [TextDelta("", n + 1, events=tuple(own)) for n, own in enumerate(events)]
    stats = EngineStats(reused_tokens=64)
    deltas.append(TextDelta("", len(deltas), finish, stats, events=()))
    fields: dict[str, Any] = {
        "tools": [FUNCTION, PATCH],
        "include": ["reasoning.encrypted_content"],
    }
    if summarized:
        fields["reasoning"] = {"summary": "auto"}
    found = complete_answer(deltas, **fields)
    assert _timeless(stream_answer(deltas, **fields)) == _timeless(found)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (100, 64)
    assert usage["output_tokens"] == len(events)
    for item in found["output"]:
        if item["type"] == "reasoning":
            assert decode_thoughts(item["encrypted_content"]) == item["content"][0]["text"]
            assert [part["text"] for part in item["summary"]] == (
                [item["content"][0]["text"]] if summarized else []
            )
    statuses = [item["status"] for item in found["output"]]
    if finish == "stop":
        assert found["output"]  # an empty answer still has a message item
        assert set(statuses) == {"completed"}
        assert found["incomplete_details"] is None
    else:
        assert statuses[-1:] in ([], ["incomplete"])
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}


@given(st.lists(texts, max_size=8))
def test_plain_text_is_one_message(pieces: list[str]) -> None:
    deltas = [TextDelta(text, n + 1) for n, text in enumerate(pieces)]
    deltas.append(TextDelta("", len(deltas), "stop"))
    response = stream_answer(deltas)
    [message] = response["output"]
    assert message["content"][0]["text"] == "".join(pieces)
    assert _timeless(response) == _timeless(complete_answer(deltas))


def test_what_a_piece_has_in_common_with_others_is_written_once() -> None:
    """Events of equal tokens differ only in their number. The rest of an event is built once."""
    body = Written()
    sink = answer().stream(body, "last")
    for n in range(3):
        sink.accept(0, TextDelta("x", n))
    first, second = body.data.split(b"\n\n")[-3:-1]
    assert second == first.replace(b'"sequence_number":5', b'"sequence_number":6')


@pytest.mark.parametrize(
    ("arguments", "finish", "told"),
    [
        ('{"input": "a\\nb"}', "stop", "a\nb"),
        ('{"input": "a\\nb', "length", "a\nb"),
        ('{"inp', "length", ""),
        ("*** Begin", "stop", "*** Begin"),
        ('{"patch": "x"}', "stop", '{"patch": "x"}'),
        ("[1]", "stop", "[1]"),
        ("", "stop", ""),
    ],
)
def test_the_input_of_a_custom_tool(arguments: str, finish: Any, told: str) -> None:
    events = tuple(call_events("apply_patch", arguments, custom=True))
    deltas = [TextDelta("", 9, finish, events=events)]
    for response in (stream_answer(deltas, tools=[PATCH]), complete_answer(deltas, tools=[PATCH])):
        [item] = response["output"]
        assert (item["type"], item["call_id"], item["input"]) == ("custom_tool_call", "id", told)


def test_reasoning_tokens_are_those_that_thoughts_came_with() -> None:
    deltas = [
        TextDelta("", 1, events=()),  # a reasoning tag, without text
        TextDelta("", 4, events=(Reasoning("hm"),)),
        TextDelta("", 6, events=(Reasoning("so"), Content("it"))),
        TextDelta("", 9, "stop", events=(Content(" is"),)),
    ]
    usage = complete_answer(deltas)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 5}


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_fails_says_so_to_every_client(begun: bool) -> None:
    body = Written()
    failing = answer()
    if begun:
        failing.stream(body, "last").accept(0, TextDelta("Hel", 1))
    body.data += failing.wire().failure(EngineUnavailable("gone"))
    told = [*SSEDecoder().iter_bytes(iter([body.data]))]
    for one in told:
        EVENT.validate_json(one.data, strict=True)
    events = [one.json() for one in told]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    failed, error = events[-2:]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert [item["status"] for item in failed["response"]["output"]] == ["incomplete"] * begun
    assert error["type"] == "error"
    assert error["error"]["message"] == error["message"] == "gone"
    assert error["code"] == "engine_unavailable"


TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    "{% endfor %}<assistant>"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@contextlib.asynccontextmanager
async def asked(
    folder: Path, *, fault: Fault | None = None, **changed: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeTriton]]:
    servicer = FakeTriton(tokens=ids_of(folder, "hello"), fault=fault, step=2)
    async with (
        serving(servicer) as endpoint,
        running(folder, endpoint, **changed) as (client, _, _),
        openai.AsyncOpenAI(
            base_url=f"{client.base_url}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
        ) as api,
    ):
        yield api, servicer


def prompts(folder: Path, servicer: FakeTriton) -> list[str]:
    """Return the prompts that the engine received, as text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for request in servicer.requests:
        names = [tensor.name for tensor in request.inputs]
        ids = array("i", request.raw_input_contents[names.index("input_ids")])
        found.append(tokenizer.decode(list(ids)))
    return found


async def test_a_system_message_that_a_template_refuses_is_the_users(folder: Path) -> None:
    developer = {"role": "developer", "content": "be kind"}
    said: Any = [developer, QUESTION, developer, QUESTION, CALL, RESULT, developer]
    async with asked(folder, max_seq_len=200) as (api, servicer):
        await api.responses.create(model="m", input=said, instructions="I")
    assert prompts(folder, servicer) == [
        "<system>|I\nbe kind<user>|Hi\nbe kind\nHi<assistant>|(f)<tool>|1<user>|be kind<assistant>"
    ]


class OneSystemMessage:
    """A chat format that allows a system message only as the first message."""

    tool_form = reasoning_tags = None

    def render(self, messages: list[dict[str, Any]], *_: Any, **__: Any) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidRequest("no")
        return "".join([message["content"] for message in messages])


def test_system_messages_that_become_the_users_are_joined_once() -> None:
    """The texts are joined once. Joining them for each message took seconds for a body of 8 MB."""
    said = [{"role": r, "content": "x" * 4000} for _ in range(1000) for r in ("system", "user")]
    whole = chat(input=said)
    with costs_less_than(0.4):
        (prompt,), _ = render_prompt(whole, cast(ChatFormat, OneSystemMessage()))
    assert prompt == "x" * 4000 + "\n".join(["x" * 4000] * 1999)


async def test_what_is_oldest_is_left_out_until_the_prompt_fits(folder: Path) -> None:
    """Truncation reserves the answer's tokens, keeps instructions, and drops calls with outputs."""
    instructions = {"role": "developer", "content": "rule"}
    talk = [{"role": r, "content": f"{r[0]}{n}"} for n in range(9) for r in ("user", "assistant")]
    calls: Any = [
        *talk,
        *[FULL, CALL, CALL | {"call_id": "c2"}, RESULT, RESULT | {"call_id": "c2"}],
        {"role": "user", "content": "last"},
    ]
    async with asked(folder, max_seq_len=128) as (api, servicer):
        for room in (8, 40, 60, 88):
            fields: Any = {"input": [instructions, *calls], "max_output_tokens": room}
            answer = await api.responses.create(
                model="m", truncation="auto", instructions="I", **fields
            )
            counted = await api.responses.input_tokens.count(
                model="m", truncation="auto", instructions="I", input=fields["input"]
            )
            assert answer.usage is not None
            assert answer.usage.input_tokens <= 128 - room
            assert counted.input_tokens <= 128 - 128 // 8
        with pytest.raises(openai.BadRequestError, match="context") as refused:
            await api.responses.create(model="m", instructions="I", input=fields["input"])
        found = prompts(folder, servicer)
    assert refused.value.param == "input"
    head, tail = "<system>|I\nrule", "<user>|last<assistant>"
    called = "<assistant>hm|{}(f)(f)<tool>|1<tool>|1"
    assert found == [
        head
        + "".join(f"<user>|u{n}<assistant>|a{n}" for n in range(first, 8))
        + ("<user>|u8" + called.format("a8") if first < 9 else "")
        + tail
        for first in (7, 8, 9, 9)
    ]


async def test_an_answer_that_has_no_room_whatever_is_left_out_has_some(folder: Path) -> None:
    """Truncation reserves a default number of tokens if it cannot free `max_output_tokens`."""
    talk: Any = [{"role": "user", "content": "long " * 9}, {"role": "assistant", "content": "a"}]
    async with asked(folder, max_seq_len=128) as (api, servicer):
        for said in ([*talk, *talk, *talk, QUESTION], [*talk, QUESTION]):
            for most in (None, 127, 128, 4096):
                await api.responses.create(
                    model="m", input=said, truncation="auto", max_output_tokens=most
                )
        found = prompts(folder, servicer)
    short, long = "<user>|Hi<assistant>", f"<user>|{'long ' * 9}<assistant>|a"
    assert found == [long + short] * 8


async def test_of_one_long_turn_the_oldest_calls_are_left_out(folder: Path) -> None:
    """Two calls in a row are dropped together, because both outputs come after the second call."""
    said: Any = [QUESTION]
    for n in range(0, 8, 2):
        ids = [f"c{n}", f"c{n + 1}"]
        said += [CALL | {"call_id": i, "name": i} for i in ids]
        said += [RESULT | {"call_id": i, "output": i} for i in ids]
    async with asked(folder, max_seq_len=128) as (api, servicer):
        await api.responses.create(model="m", input=said, truncation="auto", max_output_tokens=9)
    assert prompts(folder, servicer) == [
        "".join(f"<assistant>|(c{n})(c{n + 1})<tool>|c{n}<tool>|c{n + 1}" for n in (4, 6))
        + "<assistant>"
    ]


async def test_the_openai_package_raises_where_a_stream_fails(folder: Path) -> None:
    async with asked(folder, fault="abort") as (api, _):
        events = await api.responses.create(model="m", input="Hi", stream=True)
        kinds: list[str] = []
        while not kinds or kinds[-1] != "response.failed":
            kinds.append((await anext(events)).type)
        assert kinds[-2] == "response.output_text.delta"
        with pytest.raises(openai.APIError, match="server"):
            await anext(events)
        with pytest.raises(openai.APIError, match="server"):
            async with api.responses.stream(model="m", input="Hi") as stream:
                await stream.get_final_response()


async def test_what_an_engine_lacks_is_named_as_it_is_asked_for(folder: Path) -> None:
    async with asked(folder) as (api, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(model="m", input="Hi", top_logprobs=2)
    assert refused.value.param == "top_logprobs"


async def test_a_stream_ends_without_done(folder: Path) -> None:
    async with asked(folder) as (api, _):
        raw = await api.responses.with_raw_response.create(model="m", input="Hi", stream=True)
        body = (await raw.http_response.aread()).decode()
    assert "[DONE]" not in body
    assert body.count("event: response.completed") == 1


def test_what_is_long_is_not_told_again() -> None:
    """Large tools are not repeated in the response, because three events would carry them."""
    tool = FUNCTION | {"parameters": {"type": "object", "description": "x" * 2**18}}
    said = {"instructions": "I", "tools": [tool], "tool_choice": "none"}
    short = complete_answer([TextDelta("a", 1, "stop")], **said | {"tools": [FUNCTION]})
    assert (short["instructions"], [tool["name"] for tool in short["tools"]]) == ("I", ["f"])
    long = complete_answer([TextDelta("a", 1, "stop")], **said)
    assert (long["instructions"], long["tools"], long["tool_choice"]) == (None, [], "none")


def test_to_write_an_answer_costs_nothing_by_the_size_of_its_request() -> None:
    """The request's fields are serialized when the request is parsed, off the event loop."""
    schema = {"type": "object", "properties": {f"p{n}": {"enum": [1, 2]} for n in range(4000)}}

    def cost(tools: list[dict[str, Any]]) -> float:
        wanted = chat(tools=tools)
        began = time.thread_time()
        for _ in range(20):
            answer_to(wanted).stream(Written(), "last").accept(0, TextDelta("a", 1, "stop"))
        return time.thread_time() - began

    one, many = [FUNCTION], [FUNCTION | {"name": f"f{n}", "parameters": schema} for n in range(20)]
    assert min(cost(many) for _ in range(3)) < 4 * min(cost(one) for _ in range(3))


async def test_what_a_template_refuses_is_no_way_to_shorten_a_conversation(folder: Path) -> None:
    """The error says that the prompt is too long if the template refuses every shorter prompt."""
    begins = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    config = {"eos_token": "!", "chat_template": begins + TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    called = [(CALL, RESULT | {"output": "x" * 40})] * 4
    said: Any = [QUESTION, *[item for pair in called for item in pair]]
    async with asked(folder, max_seq_len=128) as (api, _):
        with pytest.raises(openai.BadRequestError, match="context"):
            await api.responses.create(model="m", input=said, truncation="auto")
        with pytest.raises(openai.BadRequestError, match="template refused"):
            await api.responses.create(model="m", input=said[1:3], truncation="auto")
