"""Fairness before an llmapi engine, which itself serves requests in order of arrival."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.config.tenants import key_hash
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import metric_of, running
from tests.support.llmapi_models import ENDLESS, build_synthetic
from tests.support.triton_server import MODEL, serving
from triton_repo.llmapi_repository import render_llmapi

pytestmark = pytest.mark.slow

_WITHIN_S = 240.0  # only ends a test that hangs
KEYS = {"flood": "sk-flood-key", "small": "sk-small-key"}
ADMIN = "an-admin-key-of-thirty-two-characters"
ENGINE_RUNS, GUESS = 64, 64
FLOOD = ENGINE_RUNS + 16


async def test_a_flood_that_fills_the_engine_leaves_a_place_to_another_tenant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway assumes a limit of requests in flight if none is set, and warns the operator."""
    engine = build_synthetic(tmp_path / "engine", tokens_per_second=1, max_batch_size=ENGINE_RUNS)
    render_llmapi(tmp_path / "repository", {"model": str(engine)})
    tenants = [tenant(*pair) for pair in KEYS.items()]
    settings = {
        "config": write_config(tmp_path / "c.yaml", *tenants, admin_keys=[key_hash(ADMIN)]),
        "tokenizer_dir": MODEL,
        "max_seq_len": 2 * ENDLESS,
        "refuse_early": False,  # all of the flood waits
    }
    with serving(tmp_path) as triton:
        async with (
            running(tmp_path, triton.grpc, **settings) as (client, service, _),
            asyncio.timeout(_WITHIN_S),
        ):
            assert caplog.text.count("GATEWAY_REPLICA_IN_FLIGHT") == 1
            health = await client.get("/health/ready", headers=_bearer(ADMIN))
            assert f"{GUESS} requests at once" in health.json()["engine"]["warning"]

            def ask(who: str, tokens: int) -> Any:
                body = {"model": "m", "prompt": "x", "max_tokens": tokens}
                return client.post("/v1/completions", json=body, headers=_bearer(KEYS[who]))

            flood = [asyncio.create_task(ask("flood", ENDLESS)) for _ in range(FLOOD)]
            try:
                while _load(service) < FLOOD:
                    await asyncio.sleep(0.05)
                taken = metric_of(service, "gateway_places_taken")
                answer = await ask("small", 1)
            finally:
                for each in flood:
                    each.cancel()
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1)
            assert taken == 0.75 * GUESS


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _load(service: Any) -> float:
    return metric_of(service, "gateway_places_taken") + metric_of(
        service, "gateway_requests_waiting"
    )
