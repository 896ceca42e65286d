"""Text models of a repository: a disconnect stops the engine, and no characters are lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tests.support import in_process, triton_server
from tests.support.triton_server import LONG_SEQ_LEN
from triton_repo.cpu_executor import engine
from triton_repo.render import render

MODELS = Path(__file__).parents[1] / "support" / "models"
# Models like upstream's BLS of each release, and the request ids that they assign.
UPSTREAM = {"bls_v017": "none", "bls_v019": "drawn"}
# Tokens of an answer that a disconnect stops, more than the engine generates while the gateway is
# stopped, and of an answer that runs to its end.
STOPPED, RUN_THROUGH = 30_000, 300
SOON = 150
"""Tokens of less than one second."""
BEFORE_LEAVING = 20
STATISTICS = {"model": "tensorrt_llm"}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton_server.Server]:
    """Yield a Triton with our five models and a BLS model for each of upstream's behaviours."""
    folder = tmp_path_factory.mktemp("text")
    engine.build(triton_server.long_model(folder), folder / "engine")
    models = folder / "repository"
    counts = {"bls_instance_count": 1, "max_tokens_in_paged_kv_cache": 2 * LONG_SEQ_LEN}
    render(models, triton_server.repository_parameters(folder, **counts))
    ours = (models / "tensorrt_llm_bls" / "config.pbtxt").read_text()
    mark = [line for line in ours.splitlines() if "cancellation_check_period_ms" in line]
    assert len(mark) == 1
    for name, ids in UPSTREAM.items():
        (models / name / "1").mkdir(parents=True)
        shutil.copyfile(MODELS / "bls.py", models / name / "1" / "model.py")
        how = f'parameters {{ key: "inner_ids" value {{ string_value: "{ids}" }} }}'
        text = ours.replace(mark[0], how).replace("tensorrt_llm_bls", name, 1)
        (models / name / "config.pbtxt").write_text(text)
    with triton_server.serving(folder) as server:
        yield server


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, triton: triton_server.Server, model: str
) -> AsyncIterator[httpx.AsyncClient]:
    settings = {"triton_mode": "text", "triton_text_model": model, "max_seq_len": LONG_SEQ_LEN}
    settings["tokenizer_dir"] = triton_server.MODEL
    async with in_process.running(folder, triton.grpc, **settings) as (client, _, _):
        yield client


async def steps_of_an_abandoned(
    client: httpx.AsyncClient,
    triton: triton_server.Server,
    *,
    tokens: int,
    stream: bool,
    runs_on: bool,
) -> tuple[float, float, float]:
    """Return the engine's steps for a request whose client disconnects. Each step makes one token.

    With `runs_on`, wait until the request has generated all its tokens. Also return, for the
    printed table, the steps before the disconnect and the seconds from then to the end.
    """

    def steps() -> float:
        family = "nv_trt_llm_general_metrics"
        return triton.metric(family, general_type="iteration_counter", **STATISTICS)

    await asyncio.to_thread(triton.wait_active, 0)
    begun = await asyncio.to_thread(steps)
    body = {
        **{"model": "m", "prompt": "Count from 1 to 300", "max_tokens": tokens},
        **{"temperature": 0, "ignore_eos": True, "stream": stream},
    }
    asking = asyncio.create_task(client.post("/v1/completions", json=body, timeout=120))
    while (left := await asyncio.to_thread(steps)) < begun + BEFORE_LEAVING:
        assert not asking.done(), asking.result().text
        await asyncio.sleep(0.01)
    at = time.monotonic()
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.to_thread(triton.wait_active, 0)
    seconds = time.monotonic() - at
    if runs_on:
        # Triton updates the gauge of steps a moment after the gauge of active requests.
        async with asyncio.timeout(300):
            while await asyncio.to_thread(steps) < begun + tokens:
                await asyncio.sleep(0.01)
    return await asyncio.to_thread(steps) - begun, left - begun, seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stream", "stops"),
    [
        *(("ensemble", True, True), ("ensemble", False, True)),
        *(("tensorrt_llm_bls", True, True), ("tensorrt_llm_bls", False, True)),
        *(("bls_v017", True, False), ("bls_v019", True, False)),
    ],
)
async def test_a_client_that_leaves(
    triton: triton_server.Server, tmp_path: Path, model: str, stream: bool, stops: bool
) -> None:
    tokens = STOPPED if stops else RUN_THROUGH
    async with gateway(tmp_path, triton, model) as client:
        found: dict[str, Any] = (await client.get("/health/ready")).json()["engine"]
        abandoned = [
            await steps_of_an_abandoned(
                client, triton, tokens=tokens, stream=stream, runs_on=not stops
            )
            for _ in range(3 if stops else 1)
        ]
    assert ("cannot be stopped" in found.get("warning", "")) is not stops
    # Printed for the table in docs/text-models.md; run with `pytest -s`.
    for steps, left, seconds in abandoned:
        after = f"{steps - left:.0f} tokens and {seconds:.1f} s after leaving"
        print(f"\n{model}, stream {stream}: {after}, at {left:.0f} of {tokens}")
    if stops:
        # The median of three, as the machine may stop the gateway's process during one.
        assert median(steps - left for steps, left, _ in abandoned) < SOON
    else:
        [(steps, _, _)] = abandoned
        assert steps >= RUN_THROUGH


WIDE = "你好，世界！😀🎉 こんにちは"


async def test_an_answer_that_is_not_streamed_has_whole_characters(
    triton: triton_server.Server, tmp_path: Path
) -> None:
    """Check characters of several tokens. A streaming text model decodes each token alone."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"Repeat: {WIDE}"}]}
    async with gateway(tmp_path, triton, "ensemble") as client:
        answer = await client.post("/v1/chat/completions", json=body | {"temperature": 0})
    found = answer.json()
    assert found["choices"][0]["message"]["content"] == WIDE
    assert found["choices"][0]["finish_reason"] == "stop"
