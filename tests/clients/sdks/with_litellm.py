"""LiteLLM, unmodified: as a client, and as a proxy that the openai package calls."""

from __future__ import annotations

import json
import random
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import litellm
import openai
from checks import BASE_URL, CAPITAL, TOO_LONG, WEATHER, Person, forecast, refused, run
from litellm.proxy.proxy_cli import run_server

# LiteLLM's provider names for OpenAI-compatible servers.
PROVIDERS = ("openai", "hosted_vllm")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
KEY = f"sk-{secrets.token_hex(32)}"

Ask = Callable[..., Any]


def _said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def clients() -> Iterator[Ask]:
    for provider in PROVIDERS:
        yield partial(
            litellm.completion,
            model=f"{provider}/demo",
            api_base=BASE_URL,
            api_key="none",
            num_retries=0,
        )


def chat() -> None:
    for ask in clients():
        _chat(ask)


def tools() -> None:
    for ask in clients():
        _tools(ask)


def structured() -> None:
    for ask in clients():
        answer = ask(messages=_said(CAPITAL), response_format=Person, temperature=1, seed=3)
        Person.model_validate_json(answer.choices[0].message.content)


def texts() -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/demo",
        prompt="The capital of France is",
        api_base=BASE_URL,
        api_key="none",
        temperature=0,
        max_tokens=4,
    )
    assert "Paris" in answer.choices[0].text


def refusals() -> None:
    for ask in clients():
        with refused(litellm.ContextWindowExceededError):
            ask(messages=_said(TOO_LONG))
    with refused(litellm.NotFoundError):
        ask(messages=_said(CAPITAL), model="openai/nobody")


def proxy() -> None:
    with _proxy() as url, openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        ask = partial(client.chat.completions.create, model="ours")
        _chat(ask)
        _tools(ask)
        answer = client.chat.completions.parse(
            model="ours", messages=_said(CAPITAL), response_format=Person, seed=3
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        with refused(openai.BadRequestError) as errors:
            ask(messages=_said(TOO_LONG))
        assert "maximum context length" in errors[0].message


def _chat(ask: Ask) -> None:
    asked = {"messages": _said(CAPITAL), "temperature": 0}
    whole = ask(**asked)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0
    chunks = list(ask(stream=True, stream_options={"include_usage": True}, **asked))
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def _tools(ask: Ask) -> None:
    """Run two turns. The second one returns the first answer as LiteLLM dumps it."""
    asked = {"messages": _said(WEATHER), "temperature": 0, "tools": TOOLS}
    message = ask(**asked).choices[0].message
    [call] = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": forecast(arguments["city"])}
    answer = ask(**asked | {"messages": [*asked["messages"], message.model_dump(), result]})
    assert "21" in answer.choices[0].message.content
    deltas = [c.choices[0].delta for c in ask(stream=True, **asked) if c.choices]
    streamed = [part for delta in deltas for part in delta.tool_calls or []]
    assert streamed[0].function.name == "get_weather"
    assert json.loads("".join(part.function.arguments or "" for part in streamed)) == arguments


def _free_port() -> int:
    """Return a free port below the range for outgoing connections, so none takes it meanwhile."""
    while True:
        port = random.randrange(5_000, 10_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def _proxy() -> Iterator[str]:
    """Run LiteLLM's proxy in a thread of this process, as importing it takes 12 s of CPU time."""
    port = _free_port()
    upstream = {"model": "hosted_vllm/demo", "api_base": BASE_URL, "api_key": "none"}
    config = {
        "model_list": [{"model_name": "ours", "litellm_params": upstream}],
        "general_settings": {"master_key": KEY},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")
        command = ["--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
        serve = partial(run_server.main, command, standalone_mode=False)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        _wait_ready(thread, f"http://127.0.0.1:{port}/health/liveliness")
        yield f"http://127.0.0.1:{port}/v1"


def _wait_ready(thread: threading.Thread, url: str) -> None:
    while True:
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            pass
        assert thread.is_alive(), "the proxy ended at its start"
        time.sleep(0.2)


if __name__ == "__main__":
    run(chat, tools, structured, texts, refusals, proxy)
