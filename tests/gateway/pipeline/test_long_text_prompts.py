"""Long prompts for a model that takes text: decoding their ids must not block other requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.tokenization.threads import INLINE_CHARS
from tests.support.fake_llmapi import FakeLlmapi, build_outputs
from tests.support.fake_triton import serving
from tests.support.in_process import running, save_tokenizer

LONG = 100_000


class Watched:
    """A tokenizer that records in `decoded` the thread name of each long decoding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> Any:
        return self.decode_batch([ids], **options)[0]

    def decode_batch(self, batch: list[list[int]], **options: Any) -> Any:
        if sum(map(len, batch)) > INLINE_CHARS:
            self.decoded.append(threading.current_thread().name)
        return self._tokenizer.decode_batch(batch, **options)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_the_event_loop_decodes_no_long_prompt(tmp_path: Path, as_ids: bool) -> None:
    """A thread decodes a prompt of token ids. A text prompt is not decoded at all."""
    save_tokenizer(tmp_path)
    prompt: str | list[int] = "a" * LONG
    if as_ids:
        prompt = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids * LONG
    async with (
        serving(FakeLlmapi(build_outputs("hello", "stop"))) as endpoint,
        running(tmp_path, endpoint, max_seq_len=2 * LONG) as (client, service, _),
    ):
        service.prompts.tokenizer = watched = Watched(service.prompts.tokenizer)
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": prompt})
        assert answer.json()["choices"][0]["text"] == "hello"
    assert [name.partition("_")[0] for name in watched.decoded] == ["long-text"] * as_ids
