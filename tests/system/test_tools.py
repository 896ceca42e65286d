"""Tool calls and structured answers through the HTTP API."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
OPTIONS: dict[str, Any] = {"model": "demo", "temperature": 0, "tools": [WEATHER, TIME]}


def _ask(client: openai.OpenAI, **fields: Any) -> tuple[ChatCompletionMessage, str]:
    answer = client.chat.completions.create(messages=QUESTION, **OPTIONS | fields)
    return answer.choices[0].message, answer.choices[0].finish_reason


def _stream(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the message that openai-python assembles from the deltas, and the finish reason."""
    with client.chat.completions.stream(messages=QUESTION, **OPTIONS | fields) as stream:
        choice = stream.get_final_completion().choices[0]
    return choice.message.model_dump(), choice.finish_reason


def test_auto_calls_the_tool_and_uses_its_answer(client: openai.OpenAI) -> None:
    message, finish = _ask(client)
    assert finish == "tool_calls"
    assert message.content is None
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")
    answered: list[Any] = [
        *QUESTION,
        message.model_dump(),  # includes fields that are null
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'},
    ]
    last = client.chat.completions.create(messages=answered, **OPTIONS).choices[0]
    assert "21" in (last.message.content or "")
    assert last.finish_reason == "stop"


def test_streamed_calls_equal_whole_ones(client: openai.OpenAI) -> None:
    whole, finish = _ask(client)
    streamed, streamed_finish = _stream(client)
    assert streamed_finish == finish
    assert not streamed["content"]
    [call] = streamed["tool_calls"]
    assert whole.tool_calls is not None
    assert whole.tool_calls[0].type == "function"
    assert call["function"]["name"] == whole.tool_calls[0].function.name
    assert call["function"]["arguments"] == whole.tool_calls[0].function.arguments


def test_deltas_repeat_no_id_name_or_type(client: openai.OpenAI) -> None:
    deltas = [
        call
        for chunk in client.chat.completions.create(messages=QUESTION, stream=True, **OPTIONS)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    first, *rest = deltas
    assert first.function is not None
    assert (first.type, first.function.name, first.function.arguments) == (
        "function",
        "get_weather",
        "",
    )
    assert rest, "arguments are streamed"
    assert all(c.id is None and c.type is None and c.function for c in rest)
    assert all(c.function and c.function.name is None for c in rest)


def test_tools_that_are_not_needed_are_not_called(client: openai.OpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(messages=question, **OPTIONS).choices[0]
    assert "Paris" in (answer.message.content or "")
    assert answer.message.tool_calls is None
    assert answer.finish_reason == "stop"


def test_a_call_cut_by_length_ends_with_length(client: openai.OpenAI) -> None:
    """Check that a call is reported once its first argument has been generated."""
    begun = []
    for limit in (12, 14, 16, 18):
        message, finish = _ask(client, max_tokens=limit)
        assert finish == "length"
        assert message.content is None
        begun += [call.function.arguments for call in message.tool_calls or []]
    assert begun
    assert all(begun)


@pytest.mark.parametrize("stream", [True, False])
def test_required_and_named_choices_are_enforced(client: openai.OpenAI, stream: bool) -> None:
    ask: Any = _stream if stream else _ask
    for seed in range(5):
        options: dict[str, Any] = {"temperature": 1, "seed": seed}
        # With parallel calls allowed, a small model may add calls without end.
        message, finish = ask(client, tool_choice="required", parallel_tool_calls=False, **options)
        calls = message["tool_calls"] if stream else message.model_dump()["tool_calls"]
        assert finish == "tool_calls"
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] in {"get_weather", "get_time"}
            assert set(arguments) == {"city"}
        named = {"type": "function", "function": {"name": "get_time"}}
        message, finish = ask(client, tool_choice=named, **options)
        [call] = message["tool_calls"] if stream else message.model_dump()["tool_calls"]
        assert finish == "stop"
        assert call["function"]["name"] == "get_time"
        assert json.loads(call["function"]["arguments"])["city"] in {"Oslo", "Lima"}


def test_a_named_call_has_the_arguments_that_the_model_has_learned(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    cities = ["Paris", "Rome", "Berlin", "Madrid", "London", "Tokyo", "Vienna", "Oslo"]
    found = []
    for city in cities:
        question = {"role": "user", "content": f"What is the weather in {city}?"}
        answer = client.chat.completions.create(
            messages=[question], tool_choice=named, **OPTIONS
        ).choices[0]
        [call] = answer.message.tool_calls or []
        found.append(json.loads(call.function.arguments)["city"])
    assert found == cities


FORCED: list[Any] = ["required", {"type": "function", "function": {"name": "get_time"}}]


@pytest.mark.parametrize("choice", FORCED)
@pytest.mark.parametrize("limit", [1, 2, 4, 8])
def test_a_forced_call_cut_by_length_is_what_is_known_of_it(
    client: openai.OpenAI, choice: Any, limit: int
) -> None:
    fields: dict[str, Any] = OPTIONS | {"tool_choice": choice, "max_tokens": limit}
    [whole] = client.chat.completions.create(messages=QUESTION, **fields).choices
    assert whole.finish_reason == "length"
    assert whole.message.content is None
    known = [call.model_dump()["function"] for call in whole.message.tool_calls or []]
    assert len(known) <= 1
    # A client cannot parse empty arguments.
    assert all(call["arguments"] for call in known)
    with pytest.raises(json.JSONDecodeError):
        json.loads(known[0]["arguments"] if known else "")

    streamed: list[dict[str, str]] = []
    for chunk in client.chat.completions.create(messages=QUESTION, stream=True, **fields):
        [last] = chunk.choices
        assert not last.delta.content
        for call in last.delta.tool_calls or []:
            assert call.function is not None
            if call.function.name is not None:
                streamed.append({"name": call.function.name, "arguments": ""})
            streamed[-1]["arguments"] += call.function.arguments or ""
    assert last.finish_reason == "length"
    assert streamed == known


def test_parallel_calls_can_be_forbidden(client: openai.OpenAI) -> None:
    for seed in range(5):
        message, _ = _ask(
            client, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed
        )
        assert len(message.tool_calls or []) == 1


FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "reply",
        "schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_tools_beside_a_format_are_called_or_it_is_kept(client: openai.OpenAI) -> None:
    """Check a tool call and then a JSON answer, both with a response format.

    The model would write its own tags, which the guide forbids. It writes JSON after its calls.
    """
    message, finish = _ask(client, response_format=FORMAT)
    assert (finish, message.content) == ("tool_calls", None)
    [call] = message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    # The guide has no closing tag, so the city's name may be longer.
    assert json.loads(call.function.arguments)["city"].startswith("Paris")
    streamed, streamed_finish = _stream(client, response_format=FORMAT)
    assert (streamed_finish, streamed["content"]) == ("tool_calls", "")
    assert streamed["tool_calls"][0]["function"]["arguments"] == call.function.arguments
    answered: list[Any] = [
        *QUESTION,
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'},
    ]
    last = client.chat.completions.create(
        messages=answered, response_format=FORMAT, **OPTIONS
    ).choices[0]
    assert last.finish_reason == "stop"
    assert json.loads(last.message.content or "").keys() == {"city"}


def test_a_strict_tool_beside_a_format_is_held_to_its_schema(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": TIME["function"] | {"strict": True}}
    question: list[Any] = [{"role": "user", "content": "What is the time in Paris?"}]
    for seed in range(5):
        raw = client.chat.completions.with_raw_response.create(
            messages=question,
            **OPTIONS | {"tools": [strict], "temperature": 1, "seed": seed},
            response_format=FORMAT,
        )
        assert "x-ignored-parameters" not in raw.headers
        message = raw.parse().choices[0].message
        for call in message.tool_calls or ():
            assert call.type == "function"
            assert json.loads(call.function.arguments)["city"] in ("Oslo", "Lima")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _ask(client, **fields)
    assert caught.value.param == param


def test_answers_are_accepted_back_as_the_sdks_make_them(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(messages=QUESTION, **OPTIONS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    call = message.tool_calls[0].model_dump()
    assert "parsed_arguments" in call["function"]
    history: list[Any] = [
        *QUESTION,
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 21}'},
    ]
    answer = client.chat.completions.create(messages=history, **OPTIONS)
    assert "21" in (answer.choices[0].message.content or "")
