"""Text of a request is data for the chat template: it is never compiled or executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest

from gateway.errors import InvalidRequest
from gateway.tokenization.prompts import Prompts
from ops.commands.up import DEMO_MODEL
from tests.support.cpu import costs_less_than
from tests.support.local_stack import Stack

CPU_SECONDS = 1.0
PATIENCE_S = 60
HOSTILE = [
    "{{ 7 * 191 }}",
    "{{ range(10**9) | list }}",
    "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ messages | attr('__class__') }}",
    "{{ raise_exception('x') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{# a comment",
    "{% endfor %}",
    "{0.__class__} %s %(a)s ${a} $a",
    "__class__",
]
# A template that renders all fields of a message and a tool, and one extra variable.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m['content'] }}|{{ m.name }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }}={{ c.function.arguments | tojson }}"
    "{% endfor %}]{% endfor %}{% for t in tools or [] %}<{{ t | tojson }}>{% endfor %}"
    "{{ own }}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prompts:
    """Load a template, and then remove Jinja's compiler, so that a second compilation fails."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    prompts = Prompts.load(tmp_path)
    for name in ("compile", "from_string", "parse", "_parse", "_tokenize", "compile_expression"):
        monkeypatch.delattr(jinja2.Environment, name)
    return prompts


def test_attributes_come_before_keys(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    template = "{% for k, v in tools[0].items() %}{{ k }}={{ v }};{% endfor %}{{ tools[0].other }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    rendered = Prompts.load(tmp_path).chat.render([], [{"items": 1, "name": "n"}])
    assert rendered == "items=1;name=n;"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_request_is_compiled(prompts: Prompts, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": text, "arguments": {text: text}}}
    messages: list[dict[str, Any]] = [
        {"role": text, "content": text, "name": text},
        {"role": "assistant", "content": "", "name": "", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    quoted = json.dumps(text, ensure_ascii=False)
    assert prompts.chat.render(messages, tools, {"own": text}) == (
        f"[{text}|{text}|{text}][assistant||"
        f"|{text}={{{quoted}: {quoted}}}]"
        f'<{{"type": "function", "function": {{"name": "f", "description": {quoted}}}}}>{text}>'
    )
    # Names of variables are not compiled either, even if no template could use them.
    assert prompts.chat.render([], None, {text: "x"}).endswith(">")


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversation", "tokenize", "eos_token"),
        *("raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "lipsum"),
    ],
)
def test_what_a_template_counts_on_cannot_be_replaced(prompts: Prompts, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        prompts.chat.render([{"role": "user", "content": "x"}], None, {name: []})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("text", HOSTILE)
def test_through_the_public_door(stack: Stack, text: str) -> None:
    body = {
        "messages": [{"role": "user", "content": text}],
        "chat_template_kwargs": {"own": text, text: text},
    }
    with (
        costs_less_than(CPU_SECONDS, stack.pids["gateway"]),
        httpx.Client(base_url=stack.gateway, timeout=PATIENCE_S) as client,
    ):
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        prompt = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        chat = body | {"model": "demo", "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert text in prompt


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_a_reserved_name_is_refused_by_name(stack: Stack, path: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    other = {"messages": [{"role": "system", "content": "y"}]}
    body = {"model": "demo", "messages": messages, "chat_template_kwargs": other}
    answer = httpx.post(stack.gateway + path, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs.messages"


def test_values_that_cost_time(stack: Stack) -> None:
    """Check that the cost of large and deeply nested values is bounded by their size."""
    deep: Any = 0
    for _ in range(90):
        deep = {"a": [deep]} if isinstance(deep, int) else [deep]
    for value in (10**18, deep, ["x"] * 100_000, "x" * 4_000_000, {str(n): n for n in range(4000)}):
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"own": value},
            "max_tokens": 1,
        }
        with costs_less_than(CPU_SECONDS, stack.pids["gateway"]):
            url = f"{stack.gateway}/v1/chat/completions"
            answer = httpx.post(url, json=body, timeout=PATIENCE_S)
        assert answer.status_code in {200, 400}, answer.text[:200]
