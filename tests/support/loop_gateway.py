"""A gateway in the test's event loop, clients in threads, and the longest loop iteration."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import time
from asyncio import events
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from tokenizers import Tokenizer

from tests.support.cpu import measure_slowness
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer

_TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ (message.content or "") | replace("</think>", "") }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


_SAID = [{"role": "user", "content": "Hi"}]
SMALL_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "max_tokens": 1, "messages": _SAID},
    "/v1/completions": {"model": "m", "max_tokens": 1, "prompt": "Hi"},
    "/v1/messages": {"model": "m", "max_tokens": 1, "messages": _SAID},
    "/v1/messages/count_tokens": {"model": "m", "messages": _SAID},
    "/v1/responses": {"model": "m", "max_output_tokens": 1, "input": "Hi"},
    "/v1/responses/input_tokens": {"model": "m", "input": "Hi"},
    "/v1/embeddings": {"model": "words", "input": "Hi"},
    "/v1/rerank": {"model": "ranker", "query": "Hi", "documents": ["Hi"]},
    "/tokenize": {},
    "/detokenize": {"tokens": [1]},
}
"""A small request body by endpoint."""


class SentRequest(NamedTuple):
    """A request: path with query, and a JSON body, or None for GET."""

    path: str
    body: bytes | None = None

    def __str__(self) -> str:
        shown = "" if self.body is None else f" {len(self.body)} bytes: {self.body[:300]!r}"
        return f"{self.path[:100]}{shown}"


@dataclass(slots=True)
class LoopTurn:
    """The longest iteration of an event loop: CPU seconds on a quiet machine, and the work done."""

    seconds: float = 0.0
    work: str = ""


@dataclass
class LoopGateway:
    """A gateway in this event loop. Its clients run in threads."""

    port: int
    turn: LoopTurn = field(default_factory=LoopTurn)

    async def longest_turn(self, asked: SentRequest) -> LoopTurn:
        """Return the longest loop iteration while the gateway answers a request."""
        await asyncio.sleep(0)  # ends the caller's iteration
        self.turn.seconds = 0.0
        await asyncio.to_thread(_send, self.port, asked)
        return LoopTurn(self.turn.seconds / measure_slowness(), self.turn.work)

    async def shortest(self, asked: SentRequest, runs: int, good_s: float) -> LoopTurn:
        """Return the shortest of several measurements, as other threads may disturb the CPU caches.

        Stop early once one takes at most `good_s`.
        """
        turn = await self.longest_turn(asked)
        for _ in range(runs - 1):
            if turn.seconds <= good_s:
                break
            turn = min(turn, await self.longest_turn(asked), key=lambda each: each.seconds)
        return turn


@asynccontextmanager
async def loop_gateway(folder: Path, *, max_seq_len: int = 200_000) -> AsyncIterator[LoopGateway]:
    """Yield a gateway that has answered a request of each protocol, with garbage collection off."""
    _save_tokenizer(folder)
    settings = {"eos_token": "!", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = folder / "gateway.yaml"
    counted = {"tokenizer": str(folder), "max_tokens": 512}
    models = {
        "anonymous": True,
        "embedding_models": {"words": {"input": "TEXT", "output": "EMBEDDING"} | counted},
        "rerank_models": {
            "ranker": {"query": "QUERY", "document": "DOCUMENT", "output": "SCORE"} | counted
        },
    }
    config.write_bytes(orjson.dumps(models))
    changed = {"max_seq_len": max_seq_len, "config": config, "allow_anonymous": True}
    async with (
        serving(FakeTriton(tokens=[60], fault=None, step=0)) as endpoint,
        running(folder, endpoint, **changed) as (client, _, _),
    ):
        gateway = LoopGateway(client.base_url.port or 0)
        for path, body in SMALL_BODIES.items():
            await gateway.longest_turn(SentRequest(path, orjson.dumps(body)))
        with _measured(gateway.turn):
            yield gateway


def _save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with control tokens."""
    save_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(file)


@contextmanager
def _measured(turn: LoopTurn) -> Iterator[None]:
    run = events.Handle._run

    def timed(handle: Any) -> None:
        started = time.thread_time()
        run(handle)
        seconds = time.thread_time() - started
        if seconds > turn.seconds:
            turn.seconds, turn.work = seconds, repr(handle)[:200]

    gc.disable()
    events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        events.Handle._run = run  # type: ignore[method-assign]
        gc.enable()


def _send(port: int, asked: SentRequest) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        method = "GET" if asked.body is None else "POST"
        connection.request(method, asked.path, asked.body)
        connection.getresponse().read()
    finally:
        connection.close()
