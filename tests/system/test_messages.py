"""/v1/messages with Anthropic's own SDK, against the real stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    import anthropic

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
CALLED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}],
}
PLAIN: dict[str, Any] = {"model": "demo", "max_tokens": 60}


@pytest.fixture
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=stack.gateway, api_key="none", max_retries=0) as client:
        yield client


def create(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**_asked(fields))


def streamed(client: anthropic.Anthropic, **fields: Any) -> Any:
    with client.messages.stream(**_asked(fields)) as stream:
        return stream.get_final_message()


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the request. `temperature` is in `extra_body`, as the SDK's newest types lack it."""
    extra = {"temperature": 0} | fields.pop("extra_body", {})
    return PLAIN | fields | {"extra_body": extra}


def test_a_question_is_answered(claude: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = create(claude, messages=CAPITAL, system=system, metadata={"user_id": "u"})
    assert [block.type for block in answer.content] == ["text"]
    assert "Paris" in answer.content[0].text
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "demo", "end_turn")
    assert answer.usage.output_tokens > 0


def test_an_adapter_is_a_model(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    answer = create(claude, model="zh", messages=CAPITAL)
    same = client.chat.completions.create(
        model="zh", temperature=0, max_tokens=60, messages=CAPITAL
    )
    assert answer.content[0].text == same.choices[0].message.content
    assert answer.model == "zh"


def test_usage_tells_what_was_in_the_cache(claude: anthropic.Anthropic) -> None:
    said = [{"role": "user", "content": "Repeat: " + "one two three four " * 60}]
    first, again = (create(claude, messages=said, max_tokens=4).usage for _ in range(2))
    assert again.cache_read_input_tokens >= 64
    assert again.input_tokens + again.cache_read_input_tokens == (
        first.input_tokens + first.cache_read_input_tokens
    )
    counted = claude.messages.count_tokens(model="demo", messages=said)
    assert counted.input_tokens == again.input_tokens + again.cache_read_input_tokens


@pytest.mark.parametrize("ask", [create, streamed])
def test_without_output_a_prompt_is_in_the_cache_for_the_next_request(
    claude: anthropic.Anthropic, ask: Any
) -> None:
    said = [{"role": "user", "content": f"Repeat {ask.__name__}: " + "five six seven " * 60}]
    filled = ask(claude, messages=said, max_tokens=0)
    assert (filled.content, filled.stop_reason) == ([], "max_tokens")
    assert filled.usage.output_tokens == 0
    assert create(claude, messages=said, max_tokens=4).usage.cache_read_input_tokens >= 64


@pytest.mark.parametrize("ask", [create, streamed])
def test_a_tool_is_called_and_its_result_is_read(claude: anthropic.Anthropic, ask: Any) -> None:
    called = ask(claude, messages=WEATHER, tools=TOOLS)
    assert called.stop_reason == "tool_use"
    [call] = [block for block in called.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 C"}
    more = [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = ask(claude, messages=WEATHER + more, tools=TOOLS)
    assert "21" in answer.content[0].text
    assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("ask", [create, streamed])
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "get_weather"},
    ],
)
def test_a_call_that_must_happen(claude: anthropic.Anthropic, ask: Any, choice: Any) -> None:
    answer = ask(claude, messages=CAPITAL, tools=TOOLS, tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]
    assert list(answer.content[0].input) == ["city"]
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize("ask", [create, streamed])
def test_stop_reasons(claude: anthropic.Anthropic, ask: Any) -> None:
    count = [{"role": "user", "content": "Count from 1 to 20"}]
    stopped = ask(claude, messages=count, stop_sequences=["nope", " 7"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " 7")
    assert stopped.content[0].text.endswith("6,")
    cut = ask(claude, messages=count, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    words = 2040  # the model's window has 2,048 tokens; these words leave fewer than three
    while (left := 2048 - _tokens(claude, "one " * words)) < 1:
        words += left - 1
    full = ask(claude, messages=_said("one " * words), max_tokens=2000)
    assert full.stop_reason == "model_context_window_exceeded"


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _tokens(client: anthropic.Anthropic, text: str) -> int:
    """Return the number of prompt tokens, or 2,049 if the prompt leaves no token for an answer."""
    import anthropic

    try:
        return client.messages.count_tokens(model="demo", messages=_said(text)).input_tokens
    except anthropic.BadRequestError:
        return 2049


def test_an_answer_that_the_client_has_begun(claude: anthropic.Anthropic) -> None:
    begun = [*CAPITAL, {"role": "assistant", "content": "The capital"}]
    answer = create(claude, messages=begun)
    assert answer.content[0].text.startswith(" of France is Paris")


def test_output_in_a_form(claude: anthropic.Anthropic) -> None:
    wanted = {"format": {"type": "json_schema", "schema": {"enum": ["a", "b"]}}}
    answer = create(claude, messages=CAPITAL, output_config=wanted)
    assert answer.content[0].text in ('"a"', '"b"')


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"model": "nobody"}, "NotFoundError", "nobody"),
        ({"max_tokens": -1}, "BadRequestError", "max_tokens"),
        ({"stop_sequences": [""]}, "BadRequestError", "stop_sequences.0"),
        ({"extra_body": {"stop": ["x"]}}, "BadRequestError", "send stop_sequences instead"),
        ({"extra_body": {"temperature": 3}}, "BadRequestError", "temperature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError",
            "messages.0.content.0",
        ),
        (
            {
                "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "BadRequestError",
            "tools.1.type",
        ),
        (
            {
                "tools": [TOOLS[0] | {"input_schema": {"$ref": "#/nowhere"}}],
                "tool_choice": {"type": "any"},
            },
            "BadRequestError",
            "tools.0.input_schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/no"}}}},
            "BadRequestError",
            "output_config.format",
        ),
        (
            {"messages": [{"role": "user", "content": "a " * 9000}]},
            "BadRequestError",
            "prompt is too long",
        ),
        (
            {"messages": [*CAPITAL, {"role": "assistant", "content": " "}, *CAPITAL, CALLED]},
            "BadRequestError",
            "messages",
        ),
        ({"extra_body": {"mcp_servers": [{}]}}, "BadRequestError", "mcp_servers"),
    ],
)
@pytest.mark.parametrize("ask", [create, streamed])
def test_refusals_are_in_its_envelope_and_name_the_parameter(
    claude: anthropic.Anthropic, ask: Any, fields: Any, error: str, named: str
) -> None:
    import anthropic

    with pytest.raises(getattr(anthropic, error), match=named.replace("[", r"\[")) as refused:
        ask(claude, **{"messages": CAPITAL} | fields)
    body = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_hints_are_named(stack: Stack) -> None:
    body = PLAIN | {"messages": CAPITAL, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = httpx.post(f"{stack.gateway}/v1/messages", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-parameters"] == "thinking.budget_tokens"


requests = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["demo", "ja"]),
        "messages": st.sampled_from([CAPITAL, WEATHER, [{"role": "user", "content": "🦉 你好"}]]),
        "max_tokens": st.sampled_from([1, 10, 40]),
    },
    optional={
        "stop_sequences": st.lists(st.sampled_from([",", "世", "a", " is"]), max_size=2),
        "tools": st.just(TOOLS),
        "system": st.just("Be brief."),
        "extra_body": st.fixed_dictionaries({"top_k": st.just(1)}),
    },
)


@pytest.mark.slow
@settings(
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(request=requests)
def test_streamed_equals_whole(claude: anthropic.Anthropic, request: dict[str, Any]) -> None:
    whole, stream = create(claude, **request), streamed(claude, **request)
    assert _told(stream) == _told(whole)


@pytest.mark.slow
@settings(
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(request=requests)
def test_it_says_what_a_chat_says(
    claude: anthropic.Anthropic, client: openai.OpenAI, request: dict[str, Any]
) -> None:
    message = create(claude, **request)
    system = [{"role": "system", "content": request["system"]}] if "system" in request else []
    chat: dict[str, Any] = {
        "model": request["model"],
        "messages": system + request["messages"],
        "max_tokens": request["max_tokens"],
        "stop": request.get("stop_sequences") or None,
        "temperature": 0,
    }
    if "tools" in request:
        function = {k: TOOLS[0][k] for k in ("name", "description")}
        function["parameters"] = TOOLS[0]["input_schema"]
        chat["tools"] = [{"type": "function", "function": function}]
    answer = client.chat.completions.create(**chat)
    choice, usage = answer.choices[0], answer.usage
    text = "".join(block.text for block in message.content if block.type == "text")
    assert text == (choice.message.content or "")
    names = [block.name for block in message.content if block.type == "tool_use"]
    assert names == [call.function.name for call in choice.message.tool_calls or []]
    assert message.usage.output_tokens == usage.completion_tokens
    cached = message.usage.cache_read_input_tokens
    assert message.usage.input_tokens + cached == usage.prompt_tokens


def _told(message: Any) -> tuple[Any, ...]:
    content = [
        (block.type, getattr(block, "text", None), getattr(block, "input", None))
        for block in message.content
    ]
    return content, message.stop_reason, message.stop_sequence, message.usage.output_tokens
