"""Custom tools, allowed tools, and results of tools in chats."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer

from gateway.api.openai.answers import OpenAIAnswer
from gateway.api.openai.chat_prompts import render_chat
from gateway.api.openai.chunks import UsageFrames
from gateway.api.openai.parameters import parse
from gateway.api.openai.schemas import ChatCompletionRequest
from gateway.deltas import TextDelta
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import Content
from gateway.parsers.tools.ids import TemplateIds
from gateway.tokenization.chat_format import ChatFormat
from tests.support.answers_read import Written, chat_choice_of
from tests.support.fake_triton import FakeTriton, serving
from tests.support.generations import batch
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.tool_calls import call_events

QUESTION = {"role": "user", "content": "Hi"}
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {"type": "function", "function": {"name": "g"}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits", "format": GRAMMAR}}
CHOSEN = {"type": "custom", "custom": {"name": "patch"}}
CUSTOM_CALL = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "x\n🦉"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parsed(*, strict: bool = False, **fields: Any) -> Any:
    body = {"model": "m", "messages": [QUESTION]} | fields
    return parse(ChatCompletionRequest, orjson.dumps(body), strict=strict)


def chat(**fields: Any) -> ChatCompletionRequest:
    wanted: ChatCompletionRequest = parsed(**fields).request
    return wanted


def allowed(*tools: Any, mode: str = "required") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def offered(wanted: ChatCompletionRequest) -> list[str]:
    return [tool["function"]["name"] for tool in wanted.offered_tools or []]


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    wanted = chat(tools=[F, PATCH], tool_choice=CHOSEN)
    function = (wanted.offered_tools or [])[1]
    assert function["type"] == "function"
    assert function["function"]["description"] == (
        'Edits\n\nThe input must match this grammar (lark):\nstart: "x"'
    )
    assert function["function"]["parameters"]["required"] == ["input"]
    assert wanted.forced_call is not None
    assert wanted.forced_call.name == "patch"
    guide, _ = wanted.build_guide()
    assert guide is not None
    assert '"patch"' in guide.text


def test_a_grammar_is_named_and_refused_where_the_operator_says_so() -> None:
    assert parsed(tools=[PATCH]).hints == ("tools.custom.format",)
    assert parsed(tools=[PATCH], tool_choice="none").hints == ()
    plain = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    assert parsed(tools=[plain], strict=True).hints == ()
    with pytest.raises(UnsupportedParameter) as refused:
        parsed(tools=[PATCH], strict=True)
    assert refused.value.param == "tools.custom.format"


def test_allowed_tools_are_those_that_are_offered() -> None:
    choice = allowed({"type": "function", "function": {"name": "g"}}, CHOSEN)
    wanted = chat(tools=[F, G, PATCH], tool_choice=choice)
    assert offered(wanted) == ["g", "patch"]
    assert wanted.forced_call is not None
    assert wanted.forced_call.name is None
    guide, _ = wanted.build_guide()
    assert guide is not None
    assert '"f"' not in guide.text
    assert [param for _, param in wanted.build_guide_parts()] == [
        "tools[1].function.parameters",
        "tools[2].function.parameters",
    ]
    auto = chat(tools=[F, G], tool_choice=allowed(choice["allowed_tools"]["tools"][0], mode="auto"))
    assert (offered(auto), auto.forced_call) == (["g"], None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F], "tool_choice": allowed(CHOSEN)}, "tool_choice.allowed_tools.tools[0]"),
        ({"tools": [F], "tool_choice": CHOSEN}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [F], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": ["x"]}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [F, {"type": "custom", "custom": {"name": "f"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f g"}}]}, "tools[0].custom.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields).build_guide()
    assert refused.value.param == param
    assert refused.value.message.startswith(param)
    assert not re.search(r"\[\D", refused.value.message.partition(": ")[0])  # no pydantic union tag


def test_a_tool_of_another_type_is_refused_in_words_that_say_what_is_allowed() -> None:
    with pytest.raises(InvalidRequest, match=r"^tools\[1\]: .* function or custom"):
        chat(tools=[F, {"type": "web_search"}])
    with pytest.raises(InvalidRequest, match=r"^tools\[0\]\.custom\.name: "):
        chat(tools=[{"type": "custom", "custom": {}}])


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION, {"role": "tool", "tool_call_id": "c1", "content": "1"}],
        [
            {"role": "assistant", "tool_calls": [CALL | {"id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        [
            QUESTION,
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "assistant", "tool_calls": [CALL]},
        ],
    ],
)
def test_a_result_without_its_call_is_refused_by_its_place(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="no call 'c1' comes before") as refused:
        chat(messages=messages)
    assert refused.value.param == "messages[1].tool_call_id"


@pytest.mark.parametrize("call", [CALL, CUSTOM_CALL])
def test_a_call_goes_back_with_its_result(call: dict[str, Any]) -> None:
    said = {"role": "assistant", "tool_calls": [call]}
    results = [{"role": "tool", "tool_call_id": "c1", "content": n} for n in "12"]
    assistant, *_ = chat(messages=[said, *results]).messages
    [told] = assistant.to_template(TemplateIds(None))["tool_calls"]
    assert (told["id"], told["type"]) == ("c1", "function")
    wanted = ("f", {}) if call is CALL else ("patch", {"input": "x\n🦉"})
    assert (told["function"]["name"], told["function"]["arguments"]) == wanted


def test_many_results_cost_no_more_than_their_number() -> None:
    calls = [CALL | {"id": f"c{n}"} for n in range(2000)]
    said = {"role": "assistant", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": ""} for n in range(2000)]
    assert len(chat(messages=[said, *results]).messages) == 2001


def _answer() -> OpenAIAnswer:
    return OpenAIAnswer("chat", "m", batch(), custom=frozenset({"patch"}))


def _streamed(deltas: list[TextDelta], usage: UsageFrames) -> dict[str, Any]:
    body = Written()
    sink = _answer().stream(body, usage)
    for delta in deltas:
        sink.accept(0, delta)
    return chat_choice_of(body.data)


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def deltas_of_calls(draw: st.DrawFn) -> list[TextDelta]:
    """Draw the events of a message, split into deltas at random points. Some calls are cut off."""
    events: list[MessageEvent] = []
    kinds = draw(st.lists(st.sampled_from(["text", "f", "patch"]), max_size=5))
    calls = 0
    for kind in kinds:
        if kind == "text":
            events.append(Content("x" + draw(texts)))
            continue
        arguments = json.dumps({"input": draw(texts)}, ensure_ascii=draw(st.booleans()))
        at = draw(st.integers(0, len(arguments)))
        pieces = [arguments[:at], arguments[at:]]
        call_id = f"id{calls}"
        if draw(st.booleans()):
            pieces.pop()
        events += call_events(kind, *filter(None, pieces), index=calls, call_id=call_id)
        calls += 1
    deltas: list[list[MessageEvent]] = [[]]
    for event in events:
        if draw(st.booleans()):
            deltas.append([])
        deltas[-1].append(event)
    told = [TextDelta("", n + 1, events=tuple(own)) for n, own in enumerate(deltas)]
    *others, last = told
    finish = draw(st.sampled_from(["stop", "tool_calls", "length"]))
    if draw(st.booleans()):
        return [*told, TextDelta("", len(told), finish, events=())]
    return [*others, TextDelta("", len(told), finish, events=last.events)]


@given(deltas_of_calls(), st.sampled_from(["none", "last", "each"]))
def test_a_stream_is_the_whole_answer(deltas: list[TextDelta], usage: UsageFrames) -> None:
    whole = _answer().build_complete([deltas], num_returned=None)
    ChatCompletion.model_validate_json(whole)
    message = json.loads(whole)["choices"][0]["message"]
    streamed = _streamed(deltas, usage)
    assert streamed["content"] == message["content"]
    assert streamed["tool_calls"] == message.get("tool_calls", [])
    for call in message.get("tool_calls", []):
        assert (call["type"] == "custom") is (call[call["type"]]["name"] == "patch")


TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['{"input": "*** 🦉"}', "*** 🦉"])
async def test_a_custom_tool_is_called_over_http(
    tmp_path: Path, arguments: str, stream: bool
) -> None:
    save_tokenizer(tmp_path)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    written = f"<|channel|>commentary to=functions.patch<|message|>{arguments}<|call|>"
    servicer = FakeTriton(tokens=ids_of(tmp_path, written), fault=None, step=0)
    body = {"model": "m", "messages": [QUESTION], "tools": [F, PATCH], "stream": stream}
    async with (
        serving(servicer) as endpoint,
        running(tmp_path, endpoint, max_seq_len=1024, tool_form="openai") as (client, _, _),
    ):
        told = await client.post("/v1/chat/completions", json=body)
        tokenized = {"messages": [QUESTION], "tools": [PATCH]}
        counted = await client.post("/tokenize", json=tokenized)
    assert (told.status_code, counted.status_code) == (200, 200), told.text
    assert told.headers["x-ignored-parameters"] == "tools.custom.format"
    if stream:
        events = [event.data for event in SSEDecoder().iter_bytes(iter([told.content]))]
        deltas = [c["delta"] for data in events[:-1] for c in json.loads(data)["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["custom"] for call in calls] == [
            {"name": "patch", "input": ""},
            {"input": "*** 🦉"},
        ]
        assert calls[0]["type"] == "custom"
        [finish] = [c["finish_reason"] for data in events[:-1]
                    for c in json.loads(data)["choices"] if c["finish_reason"]]  # fmt: skip
    else:
        [choice] = told.json()["choices"]
        [call], finish = choice["message"]["tool_calls"], choice["finish_reason"]
        assert call["custom"] == {"name": "patch", "input": "*** 🦉"}
    assert finish == "tool_calls"


def test_a_grammar_is_given_with_its_format() -> None:
    custom = {"name": "x", "format": {"type": "grammar"}}
    with pytest.raises(InvalidRequest, match="ield required") as refused:
        chat(tools=[{"type": "custom", "custom": custom}])
    assert "tools[0].custom.format.grammar" in str(refused.value)
    with pytest.raises(InvalidRequest, match="text or grammar"):
        chat(tools=[{"type": "custom", "custom": custom | {"format": {"type": "lark"}}}])


def test_a_tool_message_with_calls_answers_a_call_before_it() -> None:
    result = {"role": "tool", "content": "1", "tool_call_id": "c1", "tool_calls": [CALL]}
    with pytest.raises(InvalidRequest, match="no call 'c1'"):
        chat(messages=[QUESTION, result])


def test_schemas_of_tools_in_no_prompt_are_not_kept(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    form = ChatFormat(tokenizer, TEMPLATE, {}, tool_form="hermes")
    choice = allowed({"type": "function", "function": {"name": "g"}}, mode="auto")
    _, message = render_chat(chat(tools=[F, G], tool_choice=choice), form)
    assert message is not None
    assert list(message.functions) == ["g"]


def test_two_schemas_under_one_name_are_refused() -> None:
    other = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    with pytest.raises(InvalidRequest, match="another schema than an earlier tool 'f'") as refused:
        chat(tools=[G, F, other])
    assert refused.value.param == "tools[2].function.parameters"
    # A tool may be listed twice. The schema of a tool that may not be called is not compared.
    chat(tools=[F, F, G])
    chat(tools=[F, other, G], tool_choice=allowed({"type": "function", "function": {"name": "g"}}))
