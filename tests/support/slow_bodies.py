"""Request bodies below 64 KiB that hold up a gateway's event loop for long, and a search for them.

`python -m tests.support.slow_bodies --seconds 600` searches longer than the tests do, with another
seed each time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import random
import tempfile
import time
from asyncio import events
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from tokenizers import Tokenizer

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer

MAX_BODY_BYTES = 64 * 1024
_SURVIVORS = 8
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

Fields = dict[str, Any]
Fill = Callable[[random.Random, int], Any]
"""Makes the value of a parameter that has about so many bytes."""


class SentRequest(NamedTuple):
    """A request: a path with its query, and a body of JSON unless it is a GET."""

    path: str
    body: bytes | None = None

    def __str__(self) -> str:
        shown = "" if self.body is None else f" {len(self.body)} bytes: {self.body[:300]!r}"
        return f"{self.path[:100]}{shown}"


@dataclass(slots=True)
class LoopTurn:
    """The longest turn of an event loop: its CPU seconds, and the work that it was."""

    seconds: float = 0.0
    work: str = ""


@dataclass
class LoopGateway:
    """A gateway in this event loop whose clients are in threads."""

    port: int
    turn: LoopTurn = field(default_factory=LoopTurn)

    async def longest_turn(self, asked: SentRequest) -> LoopTurn:
        """Return the longest turn of the loop while a request is answered."""
        await asyncio.sleep(0)  # the turn of the caller has ended
        self.turn.seconds = 0.0
        await asyncio.to_thread(_send, self.port, asked)
        return LoopTurn(self.turn.seconds, self.turn.work)

    async def shortest(self, asked: SentRequest, runs: int, good_s: float) -> LoopTurn:
        """Return the best of some runs: other threads may have had the caches in one of them."""
        turn = await self.longest_turn(asked)
        for _ in range(runs - 1):
            if turn.seconds <= good_s:
                break
            turn = min(turn, await self.longest_turn(asked), key=lambda each: each.seconds)
        return turn


@asynccontextmanager
async def loop_gateway(folder: Path, *, max_seq_len: int = 200_000) -> AsyncIterator[LoopGateway]:
    """Yield a gateway that has answered a request of each protocol, with the collector off."""
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
        for path, body in _PLAIN.items():
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


# ---- Values


def _value(draw: random.Random, size: int) -> Any:
    """Return any value of JSON."""
    if size < 16 or draw.random() < 0.1:
        return draw.choice(("", "a", 0, 1.5, None, True, [], {}, "é", "\\", '"'))
    kind = draw.randrange(5)
    if kind == 0:
        return draw.choice("a \\é<🦉") * (size // 4)
    unit = _value(draw, draw.choice((1, 8, size // 8)))
    count = max(size // (len(orjson.dumps(unit)) + 1), 1)
    if kind == 1:
        return {f"k{n}": unit for n in range(min(count, size // 8))}
    if kind == 2:
        for _ in range(min(size // 6, 90)):
            unit = [unit] if draw.random() < 0.5 else {"a": unit}
        return unit
    return [unit] * count


def _schema(draw: random.Random, size: int) -> Fields:
    if draw.random() < 0.4:
        tiny = draw.choice(([], {}, 0, "", "a", True))
        return {"type": "object", draw.choice(("anyOf", "enum", "x")): [tiny] * (size // 3)}
    inner: Any = draw.choice(
        (
            {"type": "string"},
            {"type": "integer"},
            {},
            {"$ref": "#"},
            {"enum": ["a"]},
            [],
            [],
            0,
            "a",
        )
    )
    for _ in range(draw.choice((0, 0, 0, 3, 30))):
        keyword = draw.choice(("items", "properties", "anyOf"))
        inner = {"type": "object", keyword: {"a": inner} if keyword == "properties" else inner}
    count = max(size // (len(orjson.dumps(inner)) + 10), 1)
    match draw.randrange(4):
        case 0:
            properties = {f"p{n}": inner for n in range(count)}
            return {"type": "object", "properties": properties, "required": [*properties]}
        case 1:
            return {"anyOf": [inner] * count}
        case 2:
            return {"type": "object", "properties": {"a": {"enum": _value(draw, size)}}}
        case _:
            return {"type": "object", "properties": {"a": _value(draw, size)}}


def _many(make: Fill, overhead: int, most: int = 10**6) -> Fill:
    """Return what fills a list: with many small values, or with few large ones."""

    def fill(draw: random.Random, size: int) -> list[Any]:
        each = draw.choice((0, 0, 16, 100, size // 4))
        count = max(1, min(size // (each + overhead), most))
        return [make(draw, each) for _ in range(count)]

    return fill


def _text(draw: random.Random, size: int) -> str:
    return (
        draw.choice(("a", "a ", "\\", "é", "<|im_end|>", "</think><<<<<<<<", '{"a":', "!")) * size
    )[:size]


def _arguments(draw: random.Random, size: int) -> str:
    return orjson.dumps({"a": _value(draw, size // 2)}).decode()


def _tools(wrap: Callable[[str, Fields], Fields]) -> Fill:
    def fill(draw: random.Random, size: int) -> list[Fields]:
        count = draw.choice((1, 1, 8, 60, 128, 1000))
        each = max(size // count - 60, 0)
        schema = _schema(draw, each)
        return [wrap(f"f{n}", schema) for n in range(min(count, size // 60 + 1))]

    return fill


def _chat_message(draw: random.Random, size: int) -> Fields:
    match draw.randrange(4):
        case 0:
            return {"role": "user", "content": _text(draw, size)}
        case 1:
            part = {"type": "text", "text": draw.choice(("", "a"))}
            return {"role": "user", "content": [part] * max(size // 24, 1)}
        case 2:
            function = {"name": "f", "arguments": _arguments(draw, min(size, 2000))}
            call = {"id": "c", "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call] * max(size // 90, 1)}
        case _:
            return {"role": draw.choice(("system", "assistant")), "content": _text(draw, size)}


def _message(draw: random.Random, size: int) -> Fields:
    kind = draw.randrange(4)
    if kind == 0:
        return {"role": "user", "content": _text(draw, size)}
    block: Fields = {"type": "text", "text": "a"}
    if kind == 1:
        block = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": _value(draw, 8)}}
    if kind == 2:
        block = {"type": "thinking", "thinking": "a"}
    count = max(size // (len(orjson.dumps(block)) + 1), 1)
    return {"role": "user" if kind == 3 else "assistant", "content": [block] * count}


def _item(draw: random.Random, size: int) -> Fields:
    match draw.randrange(6):
        case 0:
            return {"role": "user", "content": _text(draw, size)}
        case 1:
            part = {"type": "input_text", "text": ""}
            return {"role": "user", "content": [part] * max(size // 32, 1)}
        case 2:
            call = {"type": "function_call", "call_id": "c", "name": "f"}
            return call | {"arguments": _arguments(draw, size)}
        case 3:
            return {"type": "function_call_output", "call_id": "c", "output": _text(draw, size)}
        case 4:
            return {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}
        case _:
            function = {"type": "function", "name": "g", "parameters": _schema(draw, size)}
            return {"type": "additional_tools", "tools": [function]}


def _format(draw: random.Random, size: int) -> Fields:
    schema = _schema(draw, size)
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _unknown(draw: random.Random, size: int) -> Fields:
    return {f"u{n}": _value(draw, 8) for n in range(size // 12)}


def _structured(draw: random.Random, size: int) -> Fields:
    text = orjson.dumps(_schema(draw, size)).decode()
    choices = ["a"] * min(size // 4, 1024)
    return draw.choice(
        ({"json": text}, {"choice": choices}, {"regex": "(a|b)" * (size // 5)}, {"grammar": text})
    )


def _one_of(*values: Any) -> Fill:
    return lambda draw, _: draw.choice(values)


_GENERATION: Mapping[str, Fill] = {
    "logit_bias": lambda _, size: {str(n): 1 for n in range(min(size // 8, 1024))},
    "stop": _many(_text, 4, 16),
    "bad_words": lambda _, size: ["a" * 60] * min(64, size // 60 + 1),
    "stop_token_ids": _one_of([1] * 16),
    "n": _one_of(1, 4, 128),
    "response_format": _format,
    "structured_outputs": _structured,
    "stream": _one_of(True),
    "stream_options": _unknown,
    "truncate_prompt_tokens": _one_of(1, 1000),
    "user": _value,
    "metadata": _value,
    "": _unknown,
}


def _function(name: str, schema: Fields) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


_TOOLS = _tools(_function)

_ENDPOINTS: Mapping[str, Mapping[str, Fill]] = {
    "/v1/chat/completions": {
        **_GENERATION,
        "messages": _many(_chat_message, 30, 2048),
        "tools": _TOOLS,
        "tool_choice": _one_of(
            "required", "none", {"type": "function", "function": {"name": "f0"}}
        ),
        "chat_template_kwargs": _value,
    },
    "/v1/completions": {
        **_GENERATION,
        "prompt": _many(
            lambda draw, size: draw.choice((_text(draw, size + 1), [1] * (size + 1))), 3
        ),
    },
    "/v1/messages": {
        "messages": _many(_message, 30, 2048),
        "system": _many(lambda draw, size: {"type": "text", "text": _text(draw, size)}, 26),
        "tools": _tools(lambda name, schema: {"name": name, "input_schema": schema}),
        "tool_choice": _one_of({"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "f0"}),
        "output_format": lambda draw, size: {"type": "json_schema", "schema": _schema(draw, size)},
        "stop_sequences": _many(_text, 4, 16),
        "metadata": _value,
        "": _unknown,
    },
    "/v1/messages/count_tokens": {
        "messages": _many(_message, 30, 2048),
        "tools": _tools(lambda name, schema: {"name": name, "input_schema": schema}),
    },
    "/v1/responses": {
        "input": _many(_item, 40),
        "instructions": _text,
        "tools": _tools(
            lambda name, schema: {"type": "function", "name": name} | {"parameters": schema}
        ),
        "tool_choice": _one_of("required", "none", {"type": "function", "name": "f0"}),
        "text": lambda draw, size: {
            "format": {"type": "json_schema", "name": "a", "schema": _schema(draw, size)}
        },
        "truncation": _one_of("auto"),
        "include": lambda _, size: ["message.output_text.logprobs"] * (size // 32),
        "metadata": lambda _, size: {f"k{n}": "a" for n in range(size // 10)},
        "": _unknown,
    },
    "/v1/responses/input_tokens": {"input": _many(_item, 40), "truncation": _one_of("auto")},
    "/v1/embeddings": {
        "input": _many(
            lambda draw, size: draw.choice((_text(draw, size + 1), [1] * (size + 1))), 3, 2048
        )
    },
    "/v1/rerank": {
        "query": _text,
        "documents": _many(lambda draw, size: _text(draw, size + 1), 3, 2048),
    },
    "/tokenize": {
        "messages": _many(_chat_message, 30, 2048),
        "prompt": _text,
        "tools": _TOOLS,
        "return_token_strs": _one_of(True),
    },
    "/detokenize": {"tokens": lambda _, size: [1] * (size // 2)},
}


_SAID = [{"role": "user", "content": "Hi"}]
_PLAIN: Mapping[str, Fields] = {
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
"""Small requests, by endpoint."""


_OFTEN = [path for path, fields in _ENDPOINTS.items() for _ in fields]
_LARGE = ("tools",)
"""Parameters that cost most, which half of the bodies have."""
_BESIDE_TOOLS = ("tool_choice", "response_format", "output_format", "text")
"""Parameters for which more is done with the tools."""

# ---- Search


class _Recipe(NamedTuple):
    """The choices that a body is drawn from."""

    path: str
    names: tuple[str, ...]
    size: int
    seed: int

    @property
    def kind(self) -> tuple[str, frozenset[str]]:
        """The endpoint and the parameters."""
        return self.path, frozenset(self.names)

    def make(self) -> SentRequest:
        """Return the body, of less than MAX_BODY_BYTES."""
        size = self.size
        while True:
            draw = random.Random(self.seed)
            body = dict(_PLAIN[self.path])
            largest = draw.choice([*self.names, *(set(_LARGE) & {*self.names})])
            for name in self.names:
                share = size if name == largest else size // 16
                value = _ENDPOINTS[self.path][name](draw, share)
                body |= value if name == "" else {name: value}
            size = size * 3 // 4
            try:
                data = orjson.dumps(body)
            except orjson.JSONEncodeError:
                continue  # it is nested too deep
            if len(data) < MAX_BODY_BYTES:
                return SentRequest(self.path, data)


def _draw_recipe(draw: random.Random) -> _Recipe:
    path = draw.choice(_OFTEN)
    names = [*_ENDPOINTS[path]]
    chosen = draw.sample(names, min(draw.choice((1, 1, 2)), len(names)))
    if draw.random() < 0.5:
        chosen += [name for name in _LARGE if name in names]
    if "tools" in chosen and draw.random() < 0.8:
        chosen.append(draw.choice([name for name in _BESIDE_TOOLS if name in names] or chosen))
    size = MAX_BODY_BYTES // draw.choice((1, 1, 2, 4, 8))
    return _Recipe(path, tuple(dict.fromkeys(chosen)), size, draw.randrange(2**32))


def _mutate(draw: random.Random, recipe: _Recipe) -> _Recipe:
    match draw.randrange(3):
        case 0:
            return recipe._replace(seed=draw.randrange(2**32))
        case 1:
            return recipe._replace(size=int(recipe.size * draw.uniform(0.6, 1.3)))
        case _:
            more = draw.choice([*_ENDPOINTS[recipe.path]])
            return recipe._replace(names=tuple(dict.fromkeys((*recipe.names, more)))[-4:])


async def find_slowest(
    gateway: LoopGateway, bodies: int, seed: int = 0
) -> list[tuple[SentRequest, LoopTurn]]:
    """Return the bodies with the longest turns among so many that a search draws.

    One of each combination of parameters is mutated further, so that the first that is found to be
    slow does not displace all others.
    """
    draw = random.Random(seed)
    found: dict[tuple[str, frozenset[str]], tuple[_Recipe, LoopTurn]] = {}
    for _ in range(bodies):
        if len(found) < _SURVIVORS or draw.random() < 0.6:
            recipe = _draw_recipe(draw)
        else:
            recipe = _mutate(draw, draw.choice(_slowest(found.values()))[0])
        turn = await gateway.longest_turn(recipe.make())
        known = found.get(recipe.kind)
        if known is None or known[1].seconds < turn.seconds:
            found[recipe.kind] = recipe, turn
    return [(recipe.make(), turn) for recipe, turn in _slowest(found.values())]


def _slowest(found: Iterable[tuple[_Recipe, LoopTurn]]) -> list[tuple[_Recipe, LoopTurn]]:
    return sorted(found, key=lambda each: -each[1].seconds)[:_SURVIVORS]


async def _search(seconds: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with loop_gateway(Path(folder)) as gateway:
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                for asked, _ in await find_slowest(gateway, 200, seed):
                    turn = await gateway.shortest(asked, 3, 0.0)
                    print(f"{turn.seconds * 1e3:.1f} ms: {asked}", flush=True)
                seed += 1
                print(flush=True)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Search for bodies that hold up the event loop.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    asyncio.run(_search(given.seconds, given.seed))


if __name__ == "__main__":
    _main()
