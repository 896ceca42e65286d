"""Routing by prompt prefix, to the replica that likely still has the prefix in its KV cache."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

WITHIN_S = 240.0  # only ends a test that hangs
# A token is a byte. A hash of the beginning selects a prompt's home replica, so all prompts that
# begin with this text have the same home.
BEGINNING = "You are the assistant of a company that makes things. " * 6
# The gateway remembers a longer prefix of this prompt than the part that selects the home.
CONVERSATION = f"{BEGINNING}Tell me all. {'All of it. ' * 90}"


class Pool(NamedTuple):
    engines: list[FakeTriton]
    endpoints: list[str]
    servers: list[contextlib.AsyncExitStack]
    client: httpx.AsyncClient
    service: Any
    folder: Path

    async def ask(self, prompt: str) -> int:
        """Return the number of the last engine that got the request."""
        before = [len(engine.requests) for engine in self.engines]
        await self.complete(prompt)
        after = [len(engine.requests) for engine in self.engines]
        *_, place = [n for n, count in enumerate(before) if after[n] > count]
        return place

    async def complete(self, prompt: str) -> None:
        answer = await self.client.post("/v1/completions", json={"model": "m", "prompt": prompt})
        assert answer.status_code == 200, answer.text

    async def wait_ready(self, place: int, ready: int = 1) -> None:
        endpoint = self.endpoints[place]
        while metric_of(self.service, "gateway_replica_ready", replica=endpoint) != ready:
            await asyncio.sleep(0.01)

    async def restart(self, place: int) -> None:
        """Stop the server, wait until the gateway notices it, and start a new server there."""
        await self.servers[place].aclose()
        await self.wait_ready(place, 0)
        again = serving(self.engines[place], self.endpoints[place])
        await self.servers[place].enter_async_context(again)
        await self.wait_ready(place)

    async def fail(self, place: int, prompt: str) -> None:
        """Make the engine fail until its breaker opens, then repair it and wait for the breaker."""
        engine = self.engines[place]
        engine.fault = "abort"
        endpoint = self.endpoints[place]
        [replica] = [each for each in self.service.replicas if each.endpoint == endpoint]
        while replica.breaker.allows:
            prompt += " And then?"
            await self.complete(prompt)
        engine.fault = None
        while not replica.breaker.allows:
            await asyncio.sleep(0.01)

    async def begin_away(self) -> tuple[int, int]:
        """Return the home of `CONVERSATION`, and the replica that took it from its busy home."""
        home = await self.ask(BEGINNING)
        engine = self.engines[home]
        engine.fault, before = "slow", len(engine.requests)
        held = [asyncio.create_task(self.complete(f"{BEGINNING}{n}")) for n in range(4)]
        while len(engine.requests) < before + len(held):
            await asyncio.sleep(0.01)
        away = await self.ask(CONVERSATION)
        assert away != home
        engine.fault = None
        engine.released.set()
        await asyncio.gather(*held)
        return home, away

    async def other_at(self, place: int) -> str:
        """Return another prompt, which this engine has just answered."""
        for number in range(64):
            prompt = f"{number} {'is a number. ' * 40}"
            if await self.ask(prompt) == place:
                return prompt
        raise AssertionError("all are at home elsewhere")


@contextlib.asynccontextmanager
async def pool(folder: Path, count: int = 2) -> AsyncIterator[Pool]:
    """Start a gateway and engines that report all prompt tokens as reused from their KV caches."""
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    engines = [FakeTriton(tokens=ids_of(folder, "ok"), fault=None, step=0) for _ in range(count)]
    for engine in engines:
        engine.reused = 1000
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WITHIN_S):
        servers = [await stack.enter_async_context(contextlib.AsyncExitStack()) for _ in engines]
        endpoints = [
            await server.enter_async_context(serving(engine))
            for server, engine in zip(servers, engines, strict=True)
        ]
        client, service, _ = await stack.enter_async_context(
            running(folder, ",".join(endpoints), max_seq_len=4096)
        )
        found = Pool(engines, endpoints, servers, client, service, folder)
        for place in range(count):
            await found.wait_ready(place)
        yield found


async def test_conversations_that_begin_alike_each_go_on_where_they_began(tmp_path: Path) -> None:
    async with pool(tmp_path, 4) as four:
        for engine in four.engines:
            engine.fault = "slow"
        first = [f"{BEGINNING}{number}: {chr(65 + number) * 300}" for number in range(12)]
        asked = [asyncio.create_task(four.complete(prompt)) for prompt in first]
        while sum(len(engine.requests) for engine in four.engines) < len(first):
            await asyncio.sleep(0.01)
        began = [_engine_of(four, prompt) for prompt in first]
        assert len(set(began)) > 1, "one replica should not bear all of them"
        for engine in four.engines:
            engine.fault = None
            engine.released.set()
        await asyncio.gather(*asked)
        for _ in range(2):
            assert [await four.ask(f"{prompt} And then?") for prompt in first] == began


def _engine_of(pool: Pool, prompt: str) -> int:
    packed = array("i", ids_of(pool.folder, prompt)).tobytes()
    [place] = [
        number
        for number, engine in enumerate(pool.engines)
        if any(packed in request.raw_input_contents for request in engine.requests)
    ]
    return place


@pytest.mark.parametrize("gone", [False, True])
async def test_an_answer_tells_what_is_gone(tmp_path: Path, gone: bool) -> None:
    """A prompt whose cache is gone shows that caches of earlier prompts are gone, too."""
    async with pool(tmp_path) as two:
        home, away = await two.begin_away()
        assert await two.ask(CONVERSATION) == away
        later = await two.other_at(away)
        two.engines[away].reused = 0 if gone else 1000
        assert await two.ask(later) == away
        assert await two.ask(CONVERSATION) == (home if gone else away)


@pytest.mark.parametrize("how", ["restarts", "fails"])
async def test_a_new_engine_has_nothing(tmp_path: Path, how: str) -> None:
    async with pool(tmp_path) as two:
        home, away = await two.begin_away()
        later = await two.other_at(away)
        if how == "restarts":
            await two.restart(away)
        else:
            await two.fail(away, later)
        assert await two.ask(CONVERSATION) == home


async def test_with_one_replica_nothing_is_kept(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as one:
        await one.ask(CONVERSATION)
        [replica] = one.service.replicas
        assert len(replica.engine.prefixes) == 0
        assert replica.waiting_tokens == 0
