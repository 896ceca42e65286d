"""Routing of requests: generations bypass FastAPI, which serves all other endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from gateway.server import GatewayApplication
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer


async def test_generations_pass_fastapi_by(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    servicer = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    body: dict[str, Any] = {"model": "m", "prompt": "x"}
    async with (
        serving(servicer) as endpoint,
        running(tmp_path, endpoint) as (client, _, server),
    ):
        assert (await client.get("/v1/completions")).headers["allow"] == "POST"
        cast(GatewayApplication, server.application).api.routes.clear()
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "hello"
        assert answer.headers["x-request-id"]
        assert (await client.get("/v1/models")).status_code == 404
