"""A gateway with the wrong tokenizer does not become ready and reports the difference."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import running as gateway
from tests.support.triton_server import MODEL, Server, render_core, running, serving
from tests.support.wrong_tokenizers import WRONG, with_spare_token, without_tool_tokens, write
from triton_repo.cpu_executor import engine, synthetic

_WITHIN_S = 300.0


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a Triton with all models, whose preprocessing model can be called for token ids."""
    folder = tmp_path_factory.mktemp("asked")
    engine.build(MODEL, folder / "engine")
    with running(folder) as server:
        yield server


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a Triton with the core model alone. Its configuration names the tokenizer's folder."""
    folder = tmp_path_factory.mktemp("named")
    engine.build(MODEL, folder / "engine")
    render_core(folder)
    with serving(folder) as server:
        yield server


@contextlib.asynccontextmanager
async def started(folder: Path, *servers: Server, **more: Any) -> AsyncIterator[tuple[Any, Any]]:
    endpoints = ",".join(server.grpc for server in servers)
    async with gateway(folder, endpoints, ready=False, **more) as (client, service, _):
        yield client, service


@pytest.mark.parametrize("how", ["asked", "named"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_tokenizer_keeps_triton_out(
    request: pytest.FixtureRequest, tmp_path: Path, wrong: str, how: str
) -> None:
    server: Server = request.getfixturevalue(how)
    folder = write(tmp_path / "tokenizer", WRONG[wrong]())
    async with started(tmp_path, server, tokenizer_dir=folder) as (client, _):
        found = await client.get("/health/ready")
        async with asyncio.timeout(_WITHIN_S):
            while "GATEWAY_TOKENIZER_DIR" not in found.text:
                assert found.status_code == 503
                await asyncio.sleep(0.05)
                found = await client.get("/health/ready")
        assert found.status_code == 503
        # The message names the files of both sides and a remedy.
        for said in (str(folder), str(MODEL), "here: ", "GATEWAY_TOKENIZER_CHECK=warn"):
            assert said in found.json()["triton"]
        body = {"model": "m", "prompt": "x"}
        assert (await client.post("/v1/completions", json=body)).status_code == 503


@pytest.mark.parametrize("how", ["asked", "named"])
@pytest.mark.parametrize("make", [None, without_tool_tokens, with_spare_token])
async def test_a_right_tokenizer_is_none_the_worse_for_padding(
    request: pytest.FixtureRequest, tmp_path: Path, make: Any, how: str
) -> None:
    server: Server = request.getfixturevalue(how)
    folder = MODEL if make is None else make(tmp_path / "tokenizer")
    async with started(tmp_path, server, tokenizer_dir=folder) as (client, service):
        async with asyncio.timeout(_WITHIN_S):
            await service.replicas.wait_ready()
        assert (await client.get("/health/ready")).status_code == 200
        answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
        assert answer.status_code == 200


async def test_an_overruled_check_serves_and_warns(
    asked: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "tokenizer", WRONG["same size, other ids"]())
    fields = {"tokenizer_dir": folder, "tokenizer_check": "warn"}
    async with started(tmp_path, asked, **fields) as (client, service):
        async with asyncio.timeout(_WITHIN_S):
            await service.replicas.wait_ready()
        found = (await client.get("/health/ready")).json()
    assert "is not the tokenizer" in found["engine"]["warning"]
    assert len([each for each in caplog.messages if "is not the tokenizer" in each]) == 1


async def test_each_replica_is_checked(asked: Server, tmp_path: Path) -> None:
    """Check that a replica with another engine is excluded, and that the others serve."""
    other = tmp_path / "other"
    synthetic.build(other / "engine", vocab_size=32_000, max_seq_len=100)
    render_core(other, tokenizer_dir="/nowhere")
    with serving(other) as wrong:
        async with started(tmp_path, asked, wrong, tokenizer_dir=MODEL) as (client, service):
            async with asyncio.timeout(_WITHIN_S):
                await service.replicas.wait_ready()
                right, kept_out = service.replicas
                while "32000" not in kept_out.engine.why_not_ready:
                    await asyncio.sleep(0.05)
            assert (right.ready, kept_out.ready) == (True, False)
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
            assert answer.status_code == 200


@pytest.mark.parametrize("rows", [4096, 4104, 4224, 5120, 32_000])
async def test_of_an_engine_alone_the_size_tells(tmp_path: Path, rows: int) -> None:
    synthetic.build(tmp_path / "engine", vocab_size=rows, max_seq_len=100)
    render_core(tmp_path, tokenizer_dir="/nowhere")
    with serving(tmp_path) as server:
        async with started(tmp_path, server, tokenizer_dir=MODEL) as (_, service):
            [replica] = service.replicas
            async with asyncio.timeout(_WITHIN_S):
                while not replica.ready and "4096 tokens" not in replica.engine.why_not_ready:
                    await asyncio.sleep(0.05)
            assert replica.ready is (rows < 32_000)


async def test_of_an_engine_alone_the_end_id_tells(tmp_path: Path) -> None:
    synthetic.build(tmp_path / "engine", vocab_size=4096, max_seq_len=100)
    path = tmp_path / "engine" / "config.json"
    config = json.loads(path.read_text())
    config["pretrained_config"]["eos_token_id"] = 77
    render_core(tmp_path, tokenizer_dir="/nowhere")
    with serving(tmp_path) as server:
        path.write_text(json.dumps(config))
        async with started(tmp_path, server, tokenizer_dir=MODEL) as (_, service):
            [replica] = service.replicas
            async with asyncio.timeout(_WITHIN_S):
                while "end_id [77]" not in replica.engine.why_not_ready:
                    await asyncio.sleep(0.05)
            assert not replica.ready
