"""Answers of `/health/ready` to admins and to all other clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from gateway.config.tenants import new_key
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer

KEY, ADMIN = "sk-the-key-of-acme", new_key()
STRANGERS = (None, "Bearer sk-guessed", f"Bearer {KEY}", f"Basic {ADMIN}")


async def _says(client: httpx.AsyncClient, authorization: str | None) -> httpx.Response:
    headers = {} if authorization is None else {"authorization": authorization}
    return await client.get("/health/ready", headers=headers)


async def test_strangers_learn_the_status_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tokenizer(tmp_path)
    engine = FakeTriton(tokens=ids_of(tmp_path, "x"), fault=None, step=0)
    async with serving(engine) as endpoint:
        pass
    settings = {
        "config": write_config(tmp_path / "c.yaml", tenant("acme", KEY)),
        "admin_key": ADMIN,
        "adapters": {"acme/secret": tmp_path / "nothing"},
    }
    async with running(tmp_path, endpoint, ready=False, **settings) as (client, _, _):
        for stranger in STRANGERS:
            answer = await _says(client, stranger)
            assert (answer.status_code, answer.json()) == (503, {"status": "not ready"})
        answer = await _says(client, f"Bearer {ADMIN}")
        assert (answer.status_code, answer.json()["status"]) == (503, "not ready")
        assert answer.json()["triton"] == f"Triton at {endpoint}: connection refused"

        async with serving(engine, endpoint), asyncio.timeout(300):
            while (await _says(client, None)).status_code != 200:
                await asyncio.sleep(0.05)
            for stranger in STRANGERS:
                assert (await _says(client, stranger)).json() == {"status": "ready"}
            found = (await _says(client, f"Bearer {ADMIN}")).json()
            assert found["adapters_refused"] == ["acme/secret"]
            assert found["engine"]["mode"] == "token"

            # Probes may send a tenant's key. This does not count as a guess of the admin key.
            for _ in range(30):
                assert (await _says(client, f"Bearer {KEY}")).status_code == 200
            assert "WRONG ADMIN KEYS" not in caplog.text
            wrong = {"authorization": f"Bearer {KEY}"}
            assert (await client.get("/v1/adapters", headers=wrong)).status_code == 401
