"""Stored token ids of conversations: any process tokenizes only the new turns."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.fake_llmapi import FakeLlmapi, build_outputs
from tests.support.fake_triton import serving
from tests.support.in_process import running
from tests.support.redis_server import RedisServer
from tests.support.triton_server import MODEL

BOOK = "It was the best of times, it was the worst of times. " * 40
FIRST, SECOND, THIRD = f"{BOOK}Who wrote that?", f"When? {BOOK}", "And where?"
ANSWER = "Somebody did, somewhere."


class Watched:
    """A tokenizer that records each text it encodes in `texts`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.texts += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


@contextlib.asynccontextmanager
async def fresh(
    folder: Path, endpoint: str, **changed: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Watched]]:
    """Run a gateway with empty caches and the data stored in `folder`."""
    async with running(folder, endpoint, tokenizer_dir=MODEL, max_seq_len=20_000, **changed) as (
        client,
        service,
        _,
    ):
        prompts = service.prompts
        prompts.tokenizer = watched = Watched(prompts.tokenizer)
        # Disable the word cache, so that every text reaches the tokenizer.
        prompts._words = None
        prompts._encoder = prompts._library
        yield client, watched


async def answer(client: httpx.AsyncClient, said: Any, path: str = "", **fields: Any) -> Any:
    body = {"model": "m", "input": said} | fields
    found = await client.post(f"/v1/responses{path}", json=body)
    assert found.status_code == 200, found.text
    return found.json()


def asked_of(watched: Watched) -> str:
    """Return the texts encoded since the last call, joined."""
    texts = "".join(watched.texts)
    watched.texts.clear()
    return texts


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("place", ["response", "conversation"])
async def test_only_what_is_new_is_tokenized_by_another_process(
    tmp_path: Path, place: str, shared: bool, shared_redis: RedisServer
) -> None:
    """The process belongs to the same gateway, or to another gateway with the same Redis."""
    changed: dict[str, Any] = {"redis_url": shared_redis.url} if shared else {}

    def another() -> Any:
        folder = tmp_path / str(next(numbers) if shared else 0)
        folder.mkdir(exist_ok=True)
        return fresh(folder, endpoint, **changed)

    numbers = itertools.count()
    async with serving(FakeLlmapi(build_outputs(ANSWER, "stop"))) as endpoint:
        async with another() as (client, watched):
            made = (await client.post("/v1/conversations", json={})).json()["id"]

            def going_on(previous: Any) -> dict[str, str]:
                if place == "conversation":
                    return {"conversation": made}
                return {"previous_response_id": previous["id"]} if previous else {}

            first = await answer(client, FIRST, **going_on(None))
            assert FIRST in asked_of(watched)
        async with another() as (client, watched):
            second = await answer(client, SECOND, **going_on(first))
            new = asked_of(watched)
            assert FIRST not in new
            assert new.count(BOOK) == 1
            assert len(new) < len(SECOND) + len(ANSWER) + 100
        history = [turn("user", FIRST), turn("assistant", ANSWER), turn("user", SECOND)]
        # A third process knows the turns that the first and the second one stored.
        async with another() as (client, watched):
            counted = await answer(client, THIRD, "/input_tokens", **going_on(second))
            assert BOOK not in asked_of(watched)
        async with another() as (client, watched):
            cut = {"truncation": "auto", "max_output_tokens": 16}
            third = await answer(client, THIRD, **going_on(second), **cut)
            assert BOOK not in asked_of(watched)
            # A process without any stored turns builds the same prompts.
        async with another() as (client, watched):
            same = await answer(client, history, store=False)
            assert asked_of(watched).count(BOOK) == 2
            assert same["usage"] == second["usage"]
            history += [turn("assistant", ANSWER), turn("user", THIRD)]
            same = await answer(client, history, store=False)
            assert same["usage"] == third["usage"]
            assert counted["input_tokens"] == same["usage"]["input_tokens"]


async def test_known_turns_go_with_their_response(tmp_path: Path) -> None:
    """Token ids reveal the text, so they are deleted with the response."""
    async with (
        serving(FakeLlmapi(build_outputs(ANSWER, "stop"))) as endpoint,
        running(tmp_path, endpoint, tokenizer_dir=MODEL, max_seq_len=20_000) as (
            client,
            service,
            _,
        ),
    ):
        made = (await answer(client, FIRST))["id"]
        assert any(await service.conversations.get("", [f"{made}/turns"]))
        await client.delete(f"/v1/responses/{made}")
        assert not any(await service.conversations.get("", [f"{made}/turns"]))


async def test_many_short_turns_are_not_tokenized_again_either(tmp_path: Path) -> None:
    """Short turns are stored together with the turns after them."""
    async with serving(FakeLlmapi(build_outputs(ANSWER, "stop"))) as endpoint:
        async with fresh(tmp_path, endpoint) as (client, _):
            last = await answer(client, "Turn 0")
            for n in range(1, 40):
                last = await answer(client, f"Turn {n}", previous_response_id=last["id"])
        async with fresh(tmp_path, endpoint) as (client, watched):
            last = await answer(client, "Now?", previous_response_id=last["id"])
            assert len(watched.texts) < 30
            assert last["usage"]["input_tokens"] > 700
