"""/v1/responses with OpenAI's own SDK, against the real stack."""

from __future__ import annotations

from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

CAPITAL = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": PARAMETERS,
    }
]
PLAIN: dict[str, Any] = {
    "model": "demo",
    "max_output_tokens": 60,
    "temperature": 0,
    "store": False,
}


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**PLAIN | fields)


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """Return the response that the SDK accumulates from events. Each event must fit its types."""
    with client.responses.stream(**PLAIN | fields) as stream:
        last = None
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            last = event
    assert last is not None
    assert last.type in ("response.completed", "response.incomplete")
    return last.response


both = pytest.mark.parametrize("ask", [create, streamed])


@both
def test_a_question_is_answered(client: openai.OpenAI, ask: Any) -> None:
    answer = ask(client, input=CAPITAL, instructions="Be brief.", metadata={"a": "b"}, user="u")
    assert "Paris" in answer.output_text
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "demo")
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "Be brief.")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.completed_at >= answer.created_at
    assert message.id.removeprefix("msg_") == answer.id.removeprefix("resp_") + "_0"


def test_it_is_what_a_chat_says(client: openai.OpenAI) -> None:
    for model in ("demo", "zh"):
        answer = create(client, model=model, input=CAPITAL, instructions="Be brief.")
        same = client.chat.completions.create(
            model=model,
            temperature=0,
            max_tokens=60,
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": CAPITAL},
            ],
        )
        assert answer.output_text == same.choices[0].message.content
        assert same.usage is not None
        assert answer.usage.input_tokens == same.usage.prompt_tokens
        assert answer.usage.output_tokens == same.usage.completion_tokens


@both
def test_a_tool_is_called_and_its_result_is_read(client: openai.OpenAI, ask: Any) -> None:
    called = ask(client, input=WEATHER, tools=TOOLS)
    [call] = called.output
    assert (call.type, call.name, call.arguments) == (
        "function_call",
        "get_weather",
        '{"city": "Paris"}',
    )
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 C"}
    more = [{"role": "user", "content": WEATHER}, *called.output, output]
    answer = ask(client, input=more, tools=TOOLS)
    assert "21" in answer.output_text


@both
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ],
)
def test_a_call_that_must_happen(client: openai.OpenAI, ask: Any, choice: Any) -> None:
    other = {"type": "function", "name": "other", "parameters": PARAMETERS}
    tools = [other, *TOOLS] if isinstance(choice, dict) else TOOLS
    answer = ask(client, input=CAPITAL, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    [call] = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")


@both
def test_a_custom_tool_is_given_text(client: openai.OpenAI, ask: Any) -> None:
    tool = {"type": "custom", "name": "note", "description": "Writes a text down"}
    answer = ask(
        client, input=CAPITAL, tools=[tool], tool_choice={"type": "custom", "name": "note"}
    )
    [call] = answer.output
    assert (call.type, call.name) == ("custom_tool_call", "note")
    assert isinstance(call.input, str)
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    more = [{"role": "user", "content": CAPITAL}, *answer.output, output]
    assert ask(client, input=more, tools=[tool], tool_choice="none").output_text


@both
def test_an_answer_that_is_cut(client: openai.OpenAI, ask: Any) -> None:
    answer = ask(client, input="Count from 1 to 20", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 3


class Choice(BaseModel):
    answer: Literal["Paris", "Rome"]


def test_structured_outputs(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input=CAPITAL, text_format=Choice, **PLAIN)
    assert isinstance(parsed.output_parsed, Choice)
    with client.responses.stream(input=CAPITAL, text_format=Choice, **PLAIN) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Choice)


@both
def test_log_probabilities(client: openai.OpenAI, ask: Any) -> None:
    answer = ask(client, input=CAPITAL, top_logprobs=2, include=["message.output_text.logprobs"])
    [part] = answer.output[0].content
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": WEATHER, "tools": TOOLS}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == create(client, **asked).usage.input_tokens


def deep_call(levels: int) -> dict[str, Any]:
    arguments = '{"a":' * levels + "1" + "}" * levels
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "nobody"}, "model"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        # These are chat parameters. The error must not suggest the name that /v1/responses has for
        # them.
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"response_format": {"type": "text"}}}, "response_format"),
        ({"input": [deep_call(101), {"role": "user", "content": "Hi"}]}, "input"),
        ({"temperature": 3}, "temperature"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        (
            {"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type"),
        (
            {
                "tools": [*TOOLS, TOOLS[0] | {"name": "g", "parameters": {"$ref": "#/nowhere"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tools[1].parameters",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/no"}}}},
            "text.format",
        ),
        ({"input": "a " * 9000}, "input"),
        ({"extra_body": {"prompt": {"id": "p"}}}, "prompt"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_parameter(
    client: openai.OpenAI, stream: bool, fields: Any, param: str
) -> None:
    asked = PLAIN | {"input": CAPITAL} | fields
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        client.responses.create(stream=stream, **asked)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_hints_are_named(stack: Stack) -> None:
    tool = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
    }
    body = PLAIN | {"input": CAPITAL, "tools": [tool], "text": {"verbosity": "low"}}
    answer = httpx.post(f"{stack.gateway}/v1/responses", json=body, timeout=PATIENCE_S)
    assert answer.headers["x-ignored-parameters"] == "text.verbosity, tools.format"
