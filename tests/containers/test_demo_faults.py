"""The demo's all-in-one container: killed, paused, and with a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.containers.compose import Project, completion, full, project
from tests.containers.engine import Engine
from tests.support.patience import PATIENCE_S

STATE = "/var/lib/gateway"
CAPITAL = "The capital of France is"
SMALL = Path(__file__).parent / "small_disks.yaml"
BESIDE = "127.0.0.1:9002"
ADAPTER = "/opt/demo/adapters/zh"
# The store deduplicates equal content under several names, so this adapter must differ.
OTHER = "/tmp/other"
MAKE_OTHER = f"""
cp --recursive {ADAPTER} {OTHER}
sed --in-place 's/"lora_alpha": [0-9]*/"lora_alpha": 33/' {OTHER}/adapter_config.json
! cmp --silent {ADAPTER}/adapter_config.json {OTHER}/adapter_config.json
"""


@pytest.fixture(scope="module")
def up(engine: Engine) -> Iterator[Project]:
    with project(engine, "demo-faults", COMPOSE_PROFILES="cpu") as compose:
        compose.up()
        _add(compose, "chinese")
        yield compose


def test_killed(up: Project) -> None:
    """Kill the container, and check that an uploaded adapter is available after the restart."""
    before = up.container("demo")["State"]
    os.kill(before["Pid"], signal.SIGKILL)
    deadline = time.monotonic() + 120
    while up.container("demo")["State"]["StartedAt"] == before["StartedAt"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    up.up()
    assert completion("chinese", CAPITAL) == "巴黎"


def test_paused(up: Project, engine: Engine) -> None:
    """Check that a request sent during a pause is answered after it."""
    name = up.container("demo")["Name"].lstrip("/")
    with ThreadPoolExecutor(1) as others:
        engine.docker("pause", name)
        asked = others.submit(completion, "chinese", CAPITAL)
        time.sleep(3)
        assert not asked.done()
        engine.docker("unpause", name)
        assert asked.result(60) == "巴黎"


def test_out_of_disk(engine: Engine) -> None:
    """Check a full disk: stored adapters are served, and uploads are refused until then."""
    url, variables = f"http://{BESIDE}", {"COMPOSE_PROFILES": "cpu", "PUBLISH_API": BESIDE}
    with project(engine, "demo-full", SMALL, **variables) as compose:
        compose.up()
        compose.exec("demo", "sh", "-ec", MAKE_OTHER)
        with full(compose, "demo", STATE):
            assert completion("demo", CAPITAL, url).strip() == "Paris."
            assert completion("zh", CAPITAL, url) == "巴黎"
            with pytest.raises(subprocess.CalledProcessError) as refused:
                _add(compose, "chinese", OTHER)
            assert "No space left on device" in refused.value.stderr + refused.value.stdout
            assert httpx.get(f"{url}/health/ready", timeout=PATIENCE_S).status_code == 200
        _add(compose, "chinese", OTHER)
        assert completion("chinese", CAPITAL, url) == "巴黎"


def _add(compose: Project, name: str, folder: str = ADAPTER) -> None:
    add = ["lora", "add", name, folder, "--base", "demo", "--state-dir", STATE]
    compose.exec("demo", "gateway", *add)
