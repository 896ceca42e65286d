"""Conversations over two gateways with one Redis, while a gateway is killed and Redis loses its
data.

The environment variable `CONVERSATIONS=200` runs 200 conversations instead of a dozen.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil
import pytest
from openai.types.responses import Response

from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer

T = TypeVar("T")

CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "12"))
TENANTS = ("red", "green", "blue")
AT_ONCE = 8

Call = Callable[[openai.AsyncOpenAI], Awaitable[T]]


class Talk:
    """A tenant's conversation with its expected messages. Each request goes to any gateway."""

    def __init__(self, number: int, clients: dict[str, Iterator[openai.AsyncOpenAI]]) -> None:
        self.number = number
        self.tenant = TENANTS[number % len(TENANTS)]
        self._clients = clients
        self.said: list[dict[str, str]] = []
        self.conversation: str | None = None
        self.last: str | None = None

    async def patiently(self, call: Call[T], tenant: str | None = None) -> T:
        """Call through any gateway, and retry while a gateway is unavailable."""
        async with asyncio.timeout(120):
            while True:
                try:
                    return await call(next(self._clients[tenant or self.tenant]))
                except openai.APIConnectionError:
                    pass
                except openai.APIStatusError as error:
                    if error.status_code != 503:
                        raise
                await asyncio.sleep(0.1)

    async def turn(self) -> None:
        """Add a turn. The answer repeats the number of earlier messages, so a lost message fails
        here.
        """
        if self.number % 3 == 0 and self.conversation is None:
            made = await self.patiently(lambda client: client.conversations.create())
            self.conversation = made.id
        text = f"Number {self.number}, turn {len(self.said) // 2}"
        self.said.append({"role": "user", "content": text})
        after = {"previous_response_id": self.last, "conversation": self.conversation}
        fields: dict[str, Any] = {name: id_ for name, id_ in after.items() if id_ is not None}
        if self.conversation is not None:
            fields.pop("previous_response_id", None)
        answer: Response = await self.patiently(
            lambda client: client.responses.create(
                model="demo", input=text, max_output_tokens=4, temperature=0, **fields
            )
        )
        whole = await self.patiently(
            lambda client: client.responses.input_tokens.count(
                model="demo",
                input=self.said,  # type: ignore[arg-type]
            )
        )
        assert answer.usage is not None
        assert answer.usage.input_tokens == whole.input_tokens, f"turn {len(self.said)} is short"
        self.last = answer.id
        self.said.append({"role": "assistant", "content": answer.output_text})

    async def check(self) -> None:
        """Check that all messages are stored, and that another tenant cannot read them."""
        last, conversation = self.last or "", self.conversation

        async def items(client: openai.AsyncOpenAI) -> list[str]:
            if conversation is not None:
                return await _texts(client.conversations.items.list(conversation, order="asc"))
            return await _texts(client.responses.input_items.list(last, order="asc"))

        texts = [turn["content"] for turn in self.said]
        assert await self.patiently(items) == (texts if conversation else texts[:-1])
        other = TENANTS[(self.number + 1) % len(TENANTS)]
        calls: list[Call[object]] = [
            lambda client: client.responses.retrieve(last),
            lambda client: client.responses.create(
                model="demo", input="x", previous_response_id=last
            ),
        ]
        if conversation is not None:
            calls += [
                lambda client: client.conversations.retrieve(conversation),
                lambda client: client.responses.create(
                    model="demo", input="x", conversation=conversation
                ),
            ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await self.patiently(call, other)


async def _texts(pages: AsyncIterator[Any]) -> list[str]:
    return [item.content[0].text async for item in pages]


async def _all(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    left = iter(calls)

    async def some() -> None:
        for call in left:
            await call()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(some())


def _processes(gateways: Sequence[GatewayProcess]) -> list[psutil.Process]:
    masters = [psutil.Process(gateway.process.pid) for gateway in gateways]
    return [each for master in masters for each in (master, *master.children(recursive=True))]


@pytest.mark.slow
async def test_nothing_is_lost_and_nothing_is_short(
    stack: Stack, shared_redis: RedisServer, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", *[tenant(name, f"sk-{name}") for name in TENANTS])
    settings = {"workers": 2, "redis_url": shared_redis.url}
    with ExitStack() as started:
        gateways = [
            started.enter_context(
                GatewayProcess(tmp_path / str(n), stack, config=config, **settings)
            )
            for n in range(2)
        ]
        async with AsyncExitStack() as opened:
            clients = {
                name: itertools.cycle(
                    [
                        await opened.enter_async_context(
                            openai.AsyncOpenAI(
                                base_url=f"{gateway.url}/v1",
                                api_key=f"sk-{name}",
                                max_retries=0,
                                default_headers={"connection": "close"},  # for any worker
                                timeout=PATIENCE_S,
                            )
                        )
                        for gateway in gateways
                    ]
                )
                for name in TENANTS
            }
            talks = [Talk(number, clients) for number in range(CONVERSATIONS)]
            turns = [talk.turn for talk in talks]
            began = time.monotonic()
            await _all(turns)
            await _all(turns)
            for process in _processes(gateways[:1]):
                process.kill()
            gateways[0].process.wait()
            await _all(turns)
            gateways[0].__enter__()
            await _all(turns)
            with shared_redis.client() as at_redis:
                at_redis.flushall()
            await _all(turns)
            assert {len(talk.said) for talk in talks} == {10}
            await _all([talk.check for talk in talks])
            spent = [process.cpu_times() for process in _processes(gateways)]
            print(
                f"{CONVERSATIONS} conversations of 5 turns: {time.monotonic() - began:.1f} s; CPU "
                f"of the gateways that live {sum(each.user + each.system for each in spent):.1f} s"
            )
