"""CORS preflights from origins that are not allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

ALLOWED = "https://app.example"
ASKS = {"access-control-request-method": "POST"}


@pytest.mark.parametrize(
    ("origins", "status"), [([], 405), ([ALLOWED], 400)], ids=["no origin", "another origin"]
)
async def test_the_log_names_the_setting_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, origins: list[str], status: int
) -> None:
    save_tokenizer(tmp_path)
    engine = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, cors_origins=origins) as (client, _, _),
    ):
        # These requests are no refused preflights, so nothing is logged.
        await client.options("/v1/completions", headers={"origin": "https://a.example"})
        await client.get("/v1/models", headers={"origin": "https://a.example"} | ASKS)
        if origins:
            await client.options("/v1/completions", headers={"origin": ALLOWED} | ASKS)
        assert "GATEWAY_CORS_ORIGINS" not in caplog.text
        for number in range(20):
            headers = ASKS | {"origin": f"https://{number}.example/\xe9{'x' * 5000}"}
            answer = await client.options(
                "/v1/chat/completions",
                headers={name: value.encode("latin-1") for name, value in headers.items()},
            )
            assert answer.status_code == status
            assert "access-control-allow-origin" not in answer.headers
    [line] = [record.getMessage() for record in caplog.records if record.name == "gateway.cors"]
    assert "GATEWAY_CORS_ORIGINS" in line
    assert "'https://0.example/\\xe9" in line
    assert len(line) < 500


async def test_any_origin_needs_no_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path)
    engine = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, cors_origins=["*"]) as (client, _, _),
    ):
        answer = await client.options("/v1/completions", headers={"origin": ALLOWED} | ASKS)
        assert answer.headers["access-control-allow-origin"] == "*"
    assert "GATEWAY_CORS_ORIGINS" not in caplog.text
