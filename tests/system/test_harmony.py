"""Models that write OpenAI's harmony format, such as gpt-oss: clients see no channel markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.patience import PATIENCE_S

MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>",
           "<|call|>"]  # fmt: skip
# gpt-oss' own template renders and refuses an assistant's messages in the same way.
TEMPLATE = """
{%- for m in messages %}
    {%- if m.role == "assistant" and "tool_calls" in m %}
        {%- if m.content and m.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}
        {{- "<|start|>assistant to=functions." + m.tool_calls[0].function.name }}
        {{- "<|channel|>commentary json<|message|>" }}
        {{- m.tool_calls[0].function.arguments | tojson + "<|call|>" }}
    {%- elif m.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}
    {%- else %}
        {{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = (
    f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
    'commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
)
ANSWER = f"{THOUGHT}<|channel|>final<|message|>4"
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SCHEMA = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ASKED: Any = [{"role": "user", "content": "2+2"}]


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKERS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|return|>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(token) for token in ("<|return|>", "<|call|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tmp_path


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_a_preamble_and_a_call(gpt_oss: Path, stream: bool) -> None:
    servicer = FakeTriton(tokens=ids_of(gpt_oss, CALL), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(gpt_oss, endpoint, max_seq_len=512) as (client, _, _),
        openai.AsyncOpenAI(
            base_url=f"{client.base_url}/v1", api_key="x", timeout=PATIENCE_S
        ) as api,
    ):
        answer: Any = await api.chat.completions.create(
            model="m", messages=ASKED, tools=TOOLS, stream=stream
        )
        if stream:
            chunks = [chunk.choices[0] async for chunk in answer]
            finish = chunks[-1].finish_reason
            deltas = [chunk.delta for chunk in chunks]
            thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
            content = "".join(d.content or "" for d in deltas)
            calls = [call for d in deltas for call in d.tool_calls or []]
            name = calls[0].function.name
            arguments = "".join(call.function.arguments or "" for call in calls)
        else:
            finish, message = answer.choices[0].finish_reason, answer.choices[0].message
            thought, content = message.reasoning_content, message.content
            [call] = message.tool_calls
            name, arguments = call.function.name, call.function.arguments
    assert (thought, content, name, arguments) == ("Hm.", "I look.", "f", '{"a":1}')
    assert finish == "tool_calls"


async def test_without_tools_there_are_channels_too(gpt_oss: Path) -> None:
    servicer = FakeTriton(tokens=ids_of(gpt_oss, ANSWER), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(gpt_oss, endpoint, max_seq_len=512) as (client, _, _),
    ):
        body = {"model": "m", "messages": ASKED}
        chat = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        # A completion returns the model's raw text without its special tokens.
        body = {"model": "m", "prompt": "2+2"}
        text = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    message = chat["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "4")
    assert chat["finish_reason"] == "stop"
    assert text == "analysisHm.assistantfinal4"


@pytest.mark.parametrize(
    ("guide", "output"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a":1}'),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, '{"a":1}'),
        ({"structured_outputs": {"json_object": True}, "tools": TOOLS}, '{"a":1}'),
        ({"tools": TOOLS, "tool_choice": "required"}, '[{"name": "f", "arguments": {"a":1}}]'),
    ],
)
async def test_a_guided_answer_is_in_the_final_channel(
    gpt_oss: Path, guide: dict[str, Any], output: str
) -> None:
    """Check that the guide applies from the first token, as the prompt opens the final channel."""
    servicer = FakeTriton(tokens=ids_of(gpt_oss, output), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(gpt_oss, endpoint, max_seq_len=512) as (client, _, _),
    ):
        body = {"model": "m", "messages": ASKED}
        prompt = (await client.post("/tokenize", json=body)).json()["count"]
        answer = (await client.post("/v1/chat/completions", json=body | guide)).json()
    message = answer["choices"][0]["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
    assert [message["content"], *calls] in (['{"a":1}'], [None, '{"a":1}'])
    opened = ids_of(gpt_oss, "<|channel|>final<|message|>")
    assert answer["usage"]["prompt_tokens"] == prompt + len(opened)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/messages",
            {
                "max_tokens": 99,
                "messages": ASKED,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "output_config": {"format": SCHEMA},
            },
        ),
        (
            "/v1/responses",
            {
                "input": ASKED,
                "tools": [{"type": "function", "name": "f", "parameters": {}}],
                "text": {"format": SCHEMA | {"name": "x"}},
            },
        ),
    ],
)
async def test_an_answer_in_a_format_is_one_beside_tools_in_any_protocol(
    gpt_oss: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    servicer = FakeTriton(tokens=ids_of(gpt_oss, '{"a":1}'), fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(gpt_oss, endpoint, max_seq_len=512) as (client, _, _),
    ):
        answer = await client.post(path, json=body | {"model": "m", "stream": stream})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-parameters" not in answer.headers
    if not stream:
        found = answer.json()
        [block] = found["content"] if "content" in found else found["output"][0]["content"]
        assert block["text"] == '{"a":1}'


async def test_what_was_thought_before_a_call_goes_back(gpt_oss: Path) -> None:
    """Check that reasoning goes back as `thinking`, joined with the content.

    The template takes no content beside `thinking`.
    """
    servicer = FakeTriton(tokens=ids_of(gpt_oss, ANSWER), fault=None, step=0)
    function = {"name": "f", "arguments": '{"a": 1}'}
    called = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    async with serving(servicer) as endpoint, running(gpt_oss, endpoint) as (client, _, _):
        body = {"model": "m", "messages": [*ASKED, called, result]}
        ids = (await client.post("/tokenize", json=body)).json()["tokens"]
        text = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    assert "<|channel|>analysis<|message|>Hm.\nI look.<|end|>" in text
