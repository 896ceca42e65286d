"""The Compose profile `cpu`: build, start, request, stop and restart."""

from __future__ import annotations

import time

import httpx

from tests.containers.compose import API, assert_without_rights, completion, project
from tests.containers.engine import Engine
from tests.support.patience import PATIENCE_S

STATE = "/var/lib/gateway"
CAPITAL = "The capital of France is"


def test_the_demo_is_up_and_keeps_its_adapters(engine: Engine) -> None:
    with project(engine, "cpu", COMPOSE_PROFILES="cpu") as compose:
        compose.up()
        assert completion("demo", CAPITAL).strip() == "Paris."
        assert completion("zh", CAPITAL) == "巴黎"
        add = ["lora", "add", "chinese", "/opt/demo/adapters/zh", "--base", "demo"]
        compose.exec("demo", "gateway", *add, "--state-dir", STATE)
        assert completion("chinese", CAPITAL) == "巴黎"

        assert_without_rights(compose, "demo", user="10001")
        began = time.monotonic()
        compose("down")
        # After its grace period of 20 s the container would be killed.
        assert time.monotonic() - began < 20
        compose.up()
        assert completion("chinese", CAPITAL) == "巴黎"
        served = {
            model["id"]
            for model in httpx.get(f"{API}/v1/models", timeout=PATIENCE_S).json()["data"]
        }
        assert {"demo", "zh", "ja", "chinese"} <= served
