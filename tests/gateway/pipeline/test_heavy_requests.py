"""Requests that cost the gateway much CPU: the event loop must keep serving other streams."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tokenizers import Tokenizer

from gateway.api.openai.chat_tools import ChatFunctionTool
from gateway.api.openai.formats import StructuredOutputs
from gateway.api.openai.guides import build_structured_guide, build_tool_guide
from gateway.errors import InvalidRequest
from gateway.parsers.tools.forced import ForcedCall
from gateway.pipeline.fit import fit
from gateway.tokenization.threads import INLINE_CHARS
from gateway.triton.engine import Engine
from gateway.triton.token_stream import TokenStream
from tests.support.fake_triton import INPUTS, FakeTriton, serving
from tests.support.in_process import running, save_tokenizer

MANY = 200_000
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _spent(work: Callable[[], Any]) -> float:
    """Return the CPU seconds that `work` takes in this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


@asynccontextmanager
async def _longest() -> AsyncIterator[Callable[[], float]]:
    """Yield a function that returns the CPU seconds of the loop's longest iteration so far.

    Garbage collection is off: its time depends on what earlier tests of the process have left.
    """
    longest = 0.0
    gc.disable()

    async def beat() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    task = asyncio.create_task(beat())
    try:
        yield lambda: longest
    finally:
        gc.enable()
        task.cancel()


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


async def _ask(client: httpx.AsyncClient, path: str, **fields: Any) -> tuple[httpx.Response, float]:
    """Return the answer, and the CPU seconds of the event loop's longest iteration meanwhile."""
    content = orjson.dumps({"model": "m", "max_tokens": 1} | fields)
    async with _longest() as longest:
        answer = await client.post(path, content=content)
        return answer, longest()


async def test_a_text_that_is_a_guide_is_read_off_the_loop(tmp_path: Path) -> None:
    """The search for duplicate keys is slow Python code, so it runs in a thread."""
    text = "[" + '{"a":1},' * 50_000 + '{"a":1,"a":2}]'

    def read() -> None:
        with pytest.raises(InvalidRequest):
            build_structured_guide(StructuredOutputs(json=text))

    fields = {"prompt": "Hi", "structured_outputs": {"json": text}}
    async with _gateway(tmp_path) as (client, _):
        answer, stood = await _ask(client, "/v1/completions", **fields)
        assert "has the key 'a' twice" in answer.json()["error"]["message"]
        assert stood < _spent(read) / 3


async def test_the_guide_of_many_tools_is_made_off_the_loop(tmp_path: Path) -> None:
    schema = {"anyOf": [0] * 10_000}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(64)
    ]
    fields = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    async with _gateway(tmp_path) as (client, _):
        answer, stood = await _ask(client, "/v1/chat/completions", **fields, tool_choice="required")
        assert "tool_choice: cannot be enforced" in answer.json()["error"]["message"]
        given = [ChatFunctionTool.model_validate(tool) for tool in tools]
        assert (
            stood
            < _spent(
                lambda: build_tool_guide(given, ForcedCall(), parallel=True, describe_path=str)
            )
            / 3
        )


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": MANY}])
async def test_many_ids_are_looked_at_off_the_loop(tmp_path: Path, fields: dict[str, Any]) -> None:
    prompts = [list(range(10)) * (MANY // 10) for _ in range(15)]
    prompts[-1][-1] = 2**30
    async with _gateway(tmp_path, max_seq_len=2 * MANY) as (client, _):
        answer, stood = await _ask(client, "/v1/completions", prompt=prompts, **fields)
        assert answer.json()["error"]["message"] == "prompt: token ids must be 0 to 255."
        spent = _spent(lambda: [(max(ids), array("i", ids)) for ids in prompts[:-1]])
        assert stood < spent / 3


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
            return fit(*args, **more)

        monkeypatch.setattr("gateway.pipeline.prepare.fit", noted)
        answer, _ = await _ask(client, "/v1/completions", prompt=prompts)
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
        answer, _ = await _ask(client, "/v1/completions", prompt="Hi", n=16)
    assert answer.status_code == 200, answer.text
    assert len(begun) == len(set(begun)) == 16


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-4, None)), ("right", slice(4))])
async def test_ids_that_are_cut_off_may_be_anything(tmp_path: Path, side: str, kept: slice) -> None:
    ids = [60, 61, 62, 63, 2**30, 64, 65, 66, 67]
    fields = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    async with _gateway(tmp_path) as (client, _):
        answer, _ = await _ask(client, "/v1/completions", prompt=ids, **fields)
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
        answer, _ = await _ask(client, "/v1/completions", prompt=ids, echo=True)
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
        answer, _ = await _ask(client, "/v1/completions", prompt="Hi", logit_bias=bias)
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
            answer, _ = await _ask(client, "/v1/completions", **fields)
            assert answer.status_code == 200, answer.text
            assert watched.threads == {thread}
