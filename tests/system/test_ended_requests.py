"""Models must not ask whether an ended request was cancelled: Triton 2.51 crashes on that call.

A model that asks, as TensorRT-LLM's own model.py for llmapi does, crashes Triton after few streams.
Here the other models poll for cancellation every millisecond, so that a poll meets the end of each
request. `python -m bench.llmapi_streams` does the same with 5,000 chats.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpt2 import write_gpt2
from tests.support.in_process import running as gateway
from tests.support.llmapi_models import build_synthetic
from tests.support.triton_server import (
    MODEL,
    Arrays,
    Server,
    core_inputs,
    repository_parameters,
    serving,
    text_inputs,
)
from triton_repo.cpu_executor import engine
from triton_repo.gpt_repository import render_gpt
from triton_repo.llmapi_repository import render_llmapi
from triton_repo.render import render

AT_ONCE, CHATS = 32, 320
EVERY_MS = 1


@pytest.fixture
def polling(tmp_path: Path) -> Iterator[Server]:
    """Yield a Triton with an llmapi model that polls for cancellation like TensorRT-LLM's own."""
    yield from _llmapi(tmp_path, polls_ended_requests=True)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Server]:
    yield from _llmapi(tmp_path)


def _llmapi(folder: Path, **more: Any) -> Iterator[Server]:
    fast = {"tokens_per_second": 500.0, "max_batch_size": AT_ONCE}
    parameters = {"model": str(build_synthetic(folder / "engine", **fast)), **more}
    often = {"cancellation_check_period_ms": EVERY_MS}
    render_llmapi(folder / "repository", parameters | often)
    with serving(folder) as server:
        yield server


async def statuses(triton: Server, folder: Path, **body: Any) -> list[int]:
    """Return the statuses of `CHATS` concurrent completions, or fewer if Triton crashes."""
    found: list[int] = []
    fields = {"tokenizer_dir": MODEL, "replica_in_flight": AT_ONCE, "max_seq_len": 100}
    async with gateway(folder, triton.grpc, **fields) as (client, _, _):

        async def ask() -> None:
            while len(found) < CHATS and triton.child.exit_status() is None:
                asked = {"model": "m", "prompt": "x", "max_tokens": 4} | body
                answer = await client.post("/v1/completions", json=asked)
                whole = '"finish_reason":"length"' in answer.text
                found.append(answer.status_code if whole else 599)

        await asyncio.gather(*[ask() for _ in range(AT_ONCE)])
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_ours_outlives_all_answers(ours: Server, tmp_path: Path, stream: bool) -> None:
    found = await statuses(ours, tmp_path, stream=stream)
    assert set(found) == {200}
    assert len(found) >= CHATS
    assert ours.child.exit_status() is None


async def test_one_that_polls_as_upstreams_outlives_whole_answers(
    polling: Server, tmp_path: Path
) -> None:
    assert set(await statuses(polling, tmp_path)) == {200}
    assert polling.child.exit_status() is None


async def test_and_it_does_not_outlive_streams(polling: Server, tmp_path: Path) -> None:
    """Check that the crash does happen. Otherwise the test above proves nothing."""
    found = await statuses(polling, tmp_path, stream=True)
    assert found.count(200) < CHATS
    async with asyncio.timeout(300):
        while polling.child.exit_status() is None:
            await asyncio.sleep(0.01)
    assert polling.child.exit_status() == -signal.SIGSEGV


def test_no_other_model_of_ours_ends_triton(tmp_path: Path) -> None:
    engine.build(MODEL, tmp_path / "engine")
    render(
        tmp_path / "repository",
        repository_parameters(tmp_path, cancellation_check_period_ms=EVERY_MS),
    )
    asked: list[tuple[str, Arrays]] = [
        ("tensorrt_llm", core_inputs([5, 6, 7], 3, streaming=True)),
        ("ensemble", text_inputs("x", 3, stream=True)),
        ("tensorrt_llm_bls", text_inputs("x", 3, stream=True)),
    ]
    with serving(tmp_path) as server, ThreadPoolExecutor(8) as pool:
        work = [(inputs, model) for _ in range(100) for model, inputs in asked]
        for replies in pool.map(lambda each: server.ask(*each), work):
            assert replies[-1].error is None
        assert server.child.exit_status() is None


def test_nor_does_the_gpt_repository(tmp_path: Path) -> None:
    model = write_gpt2(tmp_path / "gpt2")
    engine.build(model, tmp_path / "engine", max_seq_len=100)
    render_gpt(
        tmp_path / "repository",
        {
            "engine_dir": str(tmp_path / "engine"),
            "tokenizer_dir": str(model),
            "cancellation_check_period_ms": EVERY_MS,
        },
    )
    with serving(tmp_path) as server, ThreadPoolExecutor(8) as pool:
        inputs = core_inputs([5, 6, 7], 3, end_id=-1, pad_id=0)
        for replies in pool.map(lambda _: server.ask(inputs), range(200)):
            assert replies[-1].error is None
        assert server.child.exit_status() is None
