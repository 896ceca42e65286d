"""Parameters sent to the wrong endpoint: the refusal names the parameter to send instead."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api import successors
from gateway.api.openai.parameter_table import HARMLESS, HINTS, NOT_SERVED
from gateway.api.openai.renamed_parameters import RENAMED
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi", "store": False},
    INPUT_TOKENS: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 5},
    COUNT: {"messages": USER},
    "/tokenize": {"prompt": "hi"},
}
FORMAT = {"type": "json_object"}


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[str]:
    save_tokenizer(tmp_path)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    engine = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    async with serving(engine) as address:
        yield address


async def _ask(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, json={"model": "m"} | BODIES[path] | fields)


CASES: list[tuple[str, str, Any, str]] = [
    (RESPONSES, "max_tokens", 5, "max_output_tokens"),
    (RESPONSES, "max_completion_tokens", 5, "max_output_tokens"),
    (RESPONSES, "num_predict", 5, "max_output_tokens"),
    (RESPONSES, "response_format", FORMAT, "text.format"),
    (RESPONSES, "reasoning_effort", "low", "reasoning.effort"),
    (RESPONSES, "messages", USER, "input"),
    (INPUT_TOKENS, "messages", USER, "input"),
    (CHAT, "max_output_tokens", 5, "max_completion_tokens"),
    (CHAT, "system", "hi", "messages with the role system"),
    (CHAT, "instructions", "hi", "messages with the role system"),
    (CHAT, "prompt", "hi", "messages"),
    (CHAT, "input", "hi", "messages"),
    (CHAT, "stop_sequences", ["a"], "stop"),
    (CHAT, "text", {"format": FORMAT}, "response_format"),
    (CHAT, "output_format", {"type": "json_schema"}, "response_format"),
    (COMPLETIONS, "messages", USER, "prompt"),
    (COMPLETIONS, "max_completion_tokens", 5, "max_tokens"),
    (MESSAGES, "stop", "a", "stop_sequences"),
    (MESSAGES, "stopping_strings", ["a"], "stop_sequences"),
    (MESSAGES, "max_completion_tokens", 5, "max_tokens"),
    (MESSAGES, "response_format", FORMAT, "output_config.format"),
    (MESSAGES, "reasoning_effort", "low", "output_config.effort"),
    (MESSAGES, "enable_thinking", False, "thinking"),
    (COUNT, "stop", "a", "stop_sequences"),
    ("/tokenize", "input", "hi", "prompt"),
]


@pytest.mark.parametrize(
    ("path", "name", "value", "successor"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES]
)
async def test_a_refusal_names_the_parameter_of_this_endpoint(
    tmp_path: Path, endpoint: str, path: str, name: str, value: Any, successor: str
) -> None:
    async with running(tmp_path, endpoint) as (client, _, _):
        answer = await _ask(client, path, **{name: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    said = f"{name} is not a parameter of this endpoint; send {successor} instead."
    assert error["message"] == said
    if path not in (MESSAGES, COUNT):
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_each_name_with_a_successor_is_refused_and_not_unknown() -> None:
    served = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields
    tables = [table for name, table in vars(successors).items() if name.startswith("OF_")]
    named = {name.partition(".")[0] for table in tables for name in table}
    assert named <= NOT_SERVED.keys() | RENAMED.keys() | served
    assert not named & (HARMLESS | HINTS)


@pytest.mark.parametrize("path", [COUNT, INPUT_TOKENS])
async def test_a_count_takes_the_body_of_an_answer(
    tmp_path: Path, endpoint: str, path: str
) -> None:
    """Token counting ignores limits and sampling parameters, even with `strict_parameters`."""
    limit = "max_tokens" if path == COUNT else "max_output_tokens"
    async with running(tmp_path, endpoint, strict_parameters=True) as (client, _, _):
        answer = await _ask(client, path, **{limit: 5, "temperature": 0.5, "stream": True})
        assert answer.status_code == 200, answer.text
        named = answer.headers["x-ignored-parameters"]
        assert named == f"{limit}, temperature, stream"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"speed": "fast"},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"verbosity": "low"},
    ],
    ids=json.dumps,
)
async def test_strict_counts_refuse_what_strict_messages_refuse(
    tmp_path: Path, endpoint: str, fields: dict[str, Any]
) -> None:
    async with running(tmp_path, endpoint, strict_parameters=True) as (client, _, _):
        answers = [await _ask(client, path, **fields) for path in (MESSAGES, COUNT)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()


async def test_an_unknown_model_says_where_the_known_ones_are(
    tmp_path: Path, endpoint: str
) -> None:
    async with running(tmp_path, endpoint) as (client, _, _):
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT, "/tokenize"):
            answer = await _ask(client, path, model="response_format")
            assert answer.status_code == 404, answer.text
            assert answer.json()["error"]["message"] == (
                "The model `response_format` does not exist. "
                "GET /v1/models lists the models that your key may use."
            )


async def test_two_names_of_one_parameter_agree(tmp_path: Path, endpoint: str) -> None:
    async with running(tmp_path, endpoint) as (client, _, _):
        answer = await _ask(client, CHAT, max_tokens=5, num_predict=6)
        assert answer.json()["error"]["message"] == (
            "num_predict: found something else than max_tokens says; leave out one of the two."
        )
        answer = await _ask(client, CHAT, max_tokens=9, max_completion_tokens=2)
        assert answer.status_code == 200
