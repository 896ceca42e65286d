"""Log probabilities cost a hundred times as much as tokens: only their own requests are delayed."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.fake_triton import serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import metric_of, running, save_tokenizer
from tests.support.logits_triton import LogitsTriton

pytestmark = pytest.mark.slow

KEYS = {"flood": "sk-flood-key", "small": "sk-small-key"}
FLOOD, SMALL = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
TOKENS = list(range(32, 62))
ASKED = {"model": "m", "prompt": "x", "max_tokens": len(TOKENS), "stream": True}
HANGS_AFTER_S = 300


class World:
    """A gateway whose jobs on logits are recorded, and wait while `free` is not set."""

    def __init__(self, fake: LogitsTriton, client: httpx.AsyncClient, service: Any) -> None:
        self.fake = fake
        self.client = client
        self.service = service
        self.events: list[tuple[str, str]] = []
        """Pairs of an event, `asked` or `begun`, and the job's tenant."""
        self.in_loop = 0
        """Number of jobs that ran in the event loop's thread."""
        self.made: set[type] = set()
        """Types of the jobs' results."""
        self.free = threading.Event()
        self.free.set()
        run, loops = service.logits.run, threading.get_ident()

        async def watched(tenant: str, chars: int, work: Callable[[], Any]) -> Any:
            def begun() -> Any:
                self.events.append(("begun", tenant))
                self.in_loop += threading.get_ident() == loops
                assert self.free.wait(HANGS_AFTER_S)
                result = work()
                self.made.add(type(result))
                return result

            self.events.append(("asked", tenant))
            return await run(tenant, chars, begun)

        service.logits.run = watched

    async def stream(self, headers: dict[str, str], **fields: Any) -> list[Any]:
        """Return the choices of all chunks."""
        answer = await self.client.post("/v1/completions", json=ASKED | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        *frames, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_AFTER_S):
            while not holds():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    save_tokenizer(folder)
    config = write_config(folder / "c.yaml", *[tenant(*pair) for pair in KEYS.items()])
    fake = LogitsTriton(folder, tokens=TOKENS)
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(serving(fake))
        settings = {"config": config, **settings}
        client, service, _ = await stack.enter_async_context(running(folder, endpoint, **settings))
        client.timeout = httpx.Timeout(HANGS_AFTER_S)
        here = World(fake, client, service)
        stack.callback(here.free.set)
        yield here


def _logprobs(choices: list[Any], key: str) -> list[Any]:
    return [each for choice in choices for each in (choice["logprobs"] or {}).get(key, ())]


@pytest.mark.parametrize(("n", "aside"), [(1, False), (10, True)])
async def test_an_answer_of_many_is_written_off_the_loop(
    tmp_path: Path, n: int, aside: bool
) -> None:
    async with world(tmp_path) as here:
        asked = ASKED | {"stream": False, "n": n, "logprobs": 20}
        answer = await here.client.post("/v1/completions", json=asked, headers=SMALL)
        found = [choice["logprobs"]["tokens"] for choice in answer.json()["choices"]]
        assert [len(tokens) for tokens in found] == [len(TOKENS)] * n
        assert (bytes in here.made) is aside
        assert here.in_loop == 0


async def test_streams_keep_their_order_off_the_loop(tmp_path: Path) -> None:
    """Check twelve concurrent streams: each token has its own alternatives, in order."""
    async with world(tmp_path) as here:
        text = "".join(choice["text"] for choice in await here.stream(SMALL))
        assert len(text) == len(TOKENS)
        streams = [here.stream(FLOOD if n % 2 else SMALL, logprobs=2) for n in range(12)]
        for choices in await asyncio.gather(*streams):
            assert "".join(choice["text"] for choice in choices) == text
            assert _logprobs(choices, "tokens") == list(text)
            tops = _logprobs(choices, "top_logprobs")
            assert len(tops) == len(TOKENS)
            for n, top in enumerate(tops):
                row = here.fake.row(n).astype(np.float64)
                values = np.sort(row - np.logaddexp.reduce(row))[::-1][:2]
                likeliest = [value for token, value in top.items() if token != text[n]]
                assert likeliest == pytest.approx(values, abs=1e-5)
        assert here.events.count(("begun", "flood")) >= 6
        assert here.in_loop == 0


async def test_others_tokens_do_not_wait_for_log_probabilities(tmp_path: Path) -> None:
    """Check that another tenant's stream ends while all jobs on logits wait."""
    async with world(tmp_path) as here:
        here.free.clear()
        flood = [asyncio.create_task(here.stream(FLOOD, logprobs=5)) for _ in range(16)]
        await here.until(lambda: ("begun", "flood") in here.events)
        for fields in ({}, {"logprobs": 0}):
            choices = await here.stream(SMALL, **fields)
            assert choices[-1]["finish_reason"]
        assert ("asked", "small") not in here.events, "only alternatives need logits"
        assert not any(task.done() for task in flood)
        here.free.set()
        for choices in await asyncio.gather(*flood):
            assert len(_logprobs(choices, "top_logprobs")) == len(TOKENS)


async def test_log_probabilities_of_tenants_take_turns(tmp_path: Path) -> None:
    """Check round robin: a small tenant waits for at most two jobs of the flood between its own."""
    async with world(tmp_path) as here:
        here.free.clear()
        flood = [asyncio.create_task(here.stream(FLOOD, logprobs=5)) for _ in range(16)]
        await here.until(lambda: here.events.count(("asked", "flood")) >= 8)
        small = asyncio.create_task(here.stream(SMALL, logprobs=5))
        await here.until(lambda: ("asked", "small") in here.events)
        at = len(here.events)
        here.free.set()
        await asyncio.gather(small, *flood)
        later = here.events[at:]
        turns = [n for n, event in enumerate(later) if event == ("begun", "small")]
        assert later[: turns[0]].count(("begun", "flood")) <= 1
        between = [
            later[later.index(("asked", "small"), before) : after].count(("begun", "flood"))
            for before, after in itertools.pairwise(turns)
        ]
        assert max(between, default=0) <= 2


async def test_a_client_that_leaves_is_not_worked_for(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.free.clear()
        flood = [asyncio.create_task(here.stream(FLOOD, logprobs=5)) for _ in range(8)]
        await here.until(lambda: here.events.count(("asked", "flood")) == 8)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await here.until(lambda: not metric_of(here.service, "gateway_generations_in_flight"))
        here.free.set()
        assert len(await here.stream(SMALL, logprobs=5)) > 1
        assert here.events.count(("begun", "flood")) == 1


async def test_the_logits_of_a_prompt_are_never_here_as_a_whole(tmp_path: Path) -> None:
    """Check that the gateway reads 100 MB of logits step by step.

    While no job on them runs, the engine cannot finish sending them.
    """
    async with world(tmp_path, max_seq_len=2000) as here:
        here.fake.vocabulary = 2**17
        fields = {"prompt": "x" * 200, "echo": True, "max_tokens": 0, "stream": False}
        request = ASKED | fields | {"logprobs": 1}
        here.free.clear()
        task = asyncio.create_task(here.client.post("/v1/completions", json=request, headers=FLOOD))
        await here.until(lambda: ("begun", "flood") in here.events)
        assert len(await here.stream(SMALL)) > 1
        assert not here.fake.prompts_answered
        here.free.set()
        answer = await task
        assert here.in_loop == 0
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert len(logprobs["token_logprobs"]) == len(fields["prompt"])


@pytest.mark.parametrize(("tokens", "status"), [(10, 200), (11, 400)])
async def test_the_logits_of_a_prompt_have_a_bound(
    tmp_path: Path, tokens: int, status: int
) -> None:
    async with world(tmp_path, max_prompt_logits_bytes=10 * 256 * 4) as here:
        fields = {"prompt": "x" * tokens, "echo": True, "stream": False}
        answer = await here.client.post(
            "/v1/completions", json=ASKED | fields | {"logprobs": 0}, headers=SMALL
        )
        assert answer.status_code == status
        if status == 400:
            error = answer.json()["error"]
            assert error["param"] == "echo"
            assert "10 tokens" in error["message"]
            assert not here.fake.requests
            # The same prompt is served without log probabilities, or with those of generated tokens
            # only.
            for free in ({}, {"logprobs": 0, "echo": False}):
                answer = await here.client.post(
                    "/v1/completions", json=ASKED | fields | free, headers=SMALL
                )
                assert answer.status_code == 200


async def test_the_choices_of_a_prompt_share_its_run(tmp_path: Path) -> None:
    """Check that all choices of a prompt equal a single one, and that the engine scores it once."""
    async with world(tmp_path) as here:
        echo = {"prompt": ["abc", "vwxyz"], "echo": True, "logprobs": 2, "max_tokens": 1}

        async def shown(**fields: Any) -> list[Any]:
            asked = ASKED | echo | {"stream": False} | fields
            answer = await here.client.post("/v1/completions", json=asked, headers=SMALL)
            assert answer.status_code == 200, answer.text
            return [(choice["text"], choice["logprobs"]) for choice in answer.json()["choices"]]

        more = len(TOKENS)  # this engine always generates all of them
        alone = await shown()
        await here.until(lambda: here.fake.prompts_answered == 2)
        assert [len(logprobs["tokens"]) for _, logprobs in alone] == [3 + more, 5 + more]
        assert await shown(n=64) == [alone[0]] * 64 + [alone[1]] * 64
        await here.until(lambda: here.fake.prompts_answered == 4)
        # Only the first choice requests more alternatives than the echo shows.
        assert await shown(n=3, prompt_logprobs=5) == [alone[0]] * 3 + [alone[1]] * 3
        await here.until(lambda: here.fake.prompts_answered == 6)
        nothing_new = await shown(n=3, max_tokens=0)
        assert [len(logprobs["tokens"]) for _, logprobs in nothing_new] == [3] * 3 + [5] * 3
        await here.until(lambda: here.fake.prompts_answered == 8)
