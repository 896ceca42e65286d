"""Requests that cost the gateway much CPU: the event loop must keep serving other streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import orjson
import pytest
from tokenizers import Tokenizer

from gateway.api.openai import generation_request, schemas
from gateway.pipeline import fit as fit_module
from gateway.pipeline import mapped_inputs
from gateway.pipeline.fit import fit as fit_prompt
from gateway.tokenization.threads import INLINE_CHARS
from gateway.triton.engine import Engine
from gateway.triton.token_stream import TokenStream
from tests.support.fake_triton import INPUTS, FakeTriton, serving
from tests.support.in_process import running, save_tokenizer
from tests.support.loop_gateway import SentRequest, loop_gateway

MANY = 200_000
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _record_threads(patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> set[int]:
    """Return a set that gets the thread of each call of a module's function."""
    work, threads = getattr(module, name), set[int]()

    def call(*args: Any, **more: Any) -> Any:
        threads.add(threading.get_ident())
        return work(*args, **more)

    patch.setattr(module, name, call)
    return threads


@asynccontextmanager
async def _gateway(
    folder: Path, *, max_seq_len: int = 64
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    save_tokenizer(folder)
    config = {"eos_token": "!", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    async with (
        serving(FakeTriton(tokens=[60], fault=None, step=0)) as endpoint,
        running(folder, endpoint, max_seq_len=max_seq_len) as (client, service, _),
    ):
        yield client, service


async def _ask(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, content=orjson.dumps({"model": "m", "max_tokens": 1} | fields))


async def test_a_text_that_is_a_guide_is_read_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for duplicate keys is slow Python code, so it runs in a thread."""
    threads = _record_threads(monkeypatch, generation_request, "build_structured_guide")
    text = "[" + '{"a":1},' * 50_000 + '{"a":1,"a":2}]'
    fields = {"prompt": "Hi", "structured_outputs": {"json": text}}
    async with _gateway(tmp_path) as (client, _):
        answer = await _ask(client, "/v1/completions", **fields)
        assert "has the key 'a' twice" in answer.json()["error"]["message"]
    assert threads
    assert threading.get_ident() not in threads


async def test_the_guide_of_many_tools_is_made_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = _record_threads(monkeypatch, schemas, "build_tool_guide")
    schema = {"anyOf": [0] * 10_000}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(64)
    ]
    fields = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    async with _gateway(tmp_path) as (client, _):
        answer = await _ask(client, "/v1/chat/completions", **fields, tool_choice="required")
        assert "tool_choice: cannot be enforced" in answer.json()["error"]["message"]
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": MANY}])
async def test_many_ids_are_looked_at_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    threads = _record_threads(monkeypatch, fit_module, "_read_ids")
    prompts = [list(range(10)) * (MANY // 10) for _ in range(15)]
    prompts[-1][-1] = 2**30
    async with _gateway(tmp_path, max_seq_len=2 * MANY) as (client, _):
        answer = await _ask(client, "/v1/completions", prompt=prompts, **fields)
        assert answer.json()["error"]["message"] == "prompt: token ids must be 0 to 255."
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("count", [1900, 2048])
async def test_all_of_many_short_documents_are_tokenized_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The last group of the documents too, however few they are."""
    body = {"model": "ranker", "query": "a", "documents": ["a"] * count}
    async with loop_gateway(tmp_path) as gateway:
        threads = _record_threads(monkeypatch, mapped_inputs, "_encode_step")
        await gateway.longest_turn(SentRequest("/v1/rerank", orjson.dumps(body)))
    assert threads
    assert threading.get_ident() not in threads


@asynccontextmanager
async def _rounds() -> AsyncIterator[Callable[[], int]]:
    """Yield a function that returns the number of the event loop's iterations so far."""
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count())
    try:
        yield lambda: rounds
    finally:
        task.cancel()


async def test_between_two_short_prompts_others_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt is checked in its own iteration of the event loop. The last one is too long."""
    prompts = ["x" * INLINE_CHARS] * 127 + ["x" * 2 * INLINE_CHARS]
    async with (
        _gateway(tmp_path, max_seq_len=INLINE_CHARS + 2) as (client, _),
        _rounds() as rounds,
    ):
        fitted = []

        def noted(*args: Any, **more: Any) -> Any:
            fitted.append(rounds())
            return fit_prompt(*args, **more)

        monkeypatch.setattr("gateway.pipeline.prepare.fit", noted)
        answer = await _ask(client, "/v1/completions", prompt=prompts)
    assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    assert len(fitted) == len(set(fitted)) == 128


async def test_each_choice_begins_in_a_round_of_the_loop_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    generate = Engine.generate
    async with _gateway(tmp_path) as (client, _), _rounds() as rounds:

        def noted(engine: Engine, *args: Any, **more: Any) -> TokenStream:
            begun.append(rounds())
            return generate(engine, *args, **more)

        monkeypatch.setattr(Engine, "generate", noted)
        answer = await _ask(client, "/v1/completions", prompt="Hi", n=16)
    assert answer.status_code == 200, answer.text
    assert len(begun) == len(set(begun)) == 16


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-4, None)), ("right", slice(4))])
async def test_ids_that_are_cut_off_may_be_anything(tmp_path: Path, side: str, kept: slice) -> None:
    ids = [60, 61, 62, 63, 2**30, 64, 65, 66, 67]
    fields = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    async with _gateway(tmp_path) as (client, _):
        answer = await _ask(client, "/v1/completions", prompt=ids, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["prompt_token_ids"] == ids[kept]


class _Watched:
    """A tokenizer that records the threads in which it encodes text or decodes a long prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, *args: Any, **options: Any) -> Any:
        self.threads.add(threading.current_thread().name.partition("_")[0])
        return self._tokenizer.encode(*args, **options)

    def decode(self, ids: list[int], **options: Any) -> Any:
        return self.decode_batch([ids], **options)[0]

    def decode_batch(self, batch: list[list[int]], **options: Any) -> Any:
        if len(batch[0]) > INLINE_CHARS:
            self.threads.add(threading.current_thread().name.partition("_")[0])
        return self._tokenizer.decode_batch(batch, **options)


async def test_a_long_echo_is_decoded_off_the_loop(tmp_path: Path) -> None:
    async with _gateway(tmp_path, max_seq_len=10_000) as (client, service):
        service.prompts.tokenizer = watched = _Watched(service.prompts.tokenizer)
        ids = [*[64] * 5000, 65]
        answer = await _ask(client, "/v1/completions", prompt=ids, echo=True)
        text = service.prompts.decode([64, 65])
        assert text[0] * 5000 + text[1] in answer.json()["choices"][0]["text"]
        assert watched.threads == {"short-text"}


class _TextTriton(FakeTriton):
    """A Triton whose model takes text prompts, and biased tokens as words."""

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        answer = await super().ModelConfig(request, context)
        for name in ("text_input", "embedding_bias_words"):
            answer.config.input.add(name=name, data_type="TYPE_STRING")
        for name in ("max_tokens", "top_k"):
            answer.config.input.add(name=name, data_type="TYPE_INT32")
        for name in ("embedding_bias_weights", "top_p"):
            answer.config.input.add(name=name, data_type="TYPE_FP32")
        return answer


@pytest.mark.parametrize(("tokens", "threads"), [(90, {"short-text"}), (10, set())])
async def test_many_biased_tokens_become_words_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, threads: set[str]
) -> None:
    monkeypatch.setattr("gateway.tokenization.threads.INLINE_CHARS", 1000)
    save_tokenizer(tmp_path)
    engine = _TextTriton(tokens=[60], fault=None, step=0)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, triton_mode="text") as (client, service, _),
    ):
        service.prompts.tokenizer = watched = _Watched(service.prompts.tokenizer)
        bias = {str(token): 1 for token in range(tokens)}
        answer = await _ask(client, "/v1/completions", prompt="Hi", logit_bias=bias)
        assert answer.status_code == 200, answer.text
        (request,) = engine.requests
        place = [tensor.name for tensor in request.inputs].index("embedding_bias_words")
        assert list(request.inputs[place].shape) == [1, tokens]
        # The main thread only asks for the special tokens that the tokenizer puts before a text.
        assert watched.threads == {"MainThread", *threads}


@pytest.mark.parametrize("name", ["stop", "bad_words"])
async def test_many_words_are_tokenized_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Few words are tokenized on the event loop, because starting a thread takes longer."""
    monkeypatch.setitem(INPUTS, "INT32", (*INPUTS["INT32"], "bad_words_list"))
    long = ["x" * (1000 if name == "stop" else 800)] * 5
    for words, thread in ((long, "short-text"), (["x" * 10] * 5, "MainThread")):
        async with _gateway(tmp_path) as (client, service):
            service.prompts.tokenizer = watched = _Watched(service.prompts.tokenizer)
            fields = {"prompt": "Hi", name: words}
            answer = await _ask(client, "/v1/completions", **fields)
            assert answer.status_code == 200, answer.text
            assert watched.threads == {thread}
