"""Response, metrics and log of a request whose handler raises an unexpected exception."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from fastapi import Request
from starlette.responses import Response

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import running, save_tokenizer


async def _broken(request: Request) -> Response:
    raise RuntimeError("a secret of the server's")


async def test_an_unexpected_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tokenizer(tmp_path)
    async with (
        serving(FakeTriton(tokens=[], fault=None, step=0)) as endpoint,
        running(tmp_path, endpoint) as (client, service, server),
    ):
        server.application.api.add_route("/broken", _broken)
        with caplog.at_level(logging.INFO):
            response = await client.get("/broken", headers={"x-request-id": "mine"})
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "mine"
        assert response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["message"] == "The server had an unexpected error."
        labels = {"path": "unmatched", "status": "500"}
        assert service.metrics.registry.get_sample_value("gateway_requests_total", labels) == 1
    assert "a secret of the server's" in caplog.text
    assert "GET unmatched 500" in caplog.text
