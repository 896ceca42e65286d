"""API keys stay required: only a restart with the setting turns them off, never a file change."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

KEY = "sk-the-key-of-acme"
ALLOWED = {"allow_anonymous": "true"}
HANGS_AFTER_S = 300
REFUSED = "the old one stays in force"


def _asks_for_keys(gateway: GatewayProcess) -> bool:
    with gateway.client() as nobody, gateway.client(KEY) as acme:
        without = nobody.post("/v1/completions", json=body()).status_code
        assert acme.post("/v1/completions", json=body()).status_code == 200
    return without == 401


@pytest.mark.parametrize("text", ["", "limits: {}\n", "# tenants: []\n", "anonymous: true\n"])
def test_no_reload_turns_keys_off(stack: Stack, tmp_path: Path, text: str) -> None:
    """A reload must not turn keys off, even on a loopback host with anonymous access allowed."""
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY))
    with GatewayProcess(tmp_path / "g", stack, config=config, **ALLOWED) as gateway:
        assert _asks_for_keys(gateway)
        config.write_text(text)
        gateway.process.send_signal(signal.SIGHUP)
        gateway.wait_for(REFUSED)
        assert _asks_for_keys(gateway)
        said = gateway.text.partition(REFUSED)[2]
        assert ("KEYS STAY ON" if "anonymous" in text else "DOES NOT TURN KEYS OFF") in said


@pytest.mark.parametrize(
    ("text", "settings", "reason"),
    [
        ("", ALLOWED, "c.yaml:1: tenants: missing, which DOES NOT TURN KEYS OFF"),
        ("anonymous: true\n", {}, "anonymous: true needs GATEWAY_ALLOW_ANONYMOUS=true"),
    ],
    ids=["truncated", "not allowed"],
)
def test_no_start_is_open_by_accident(
    stack: Stack, tmp_path: Path, text: str, settings: dict[str, str], reason: str
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    gateway = GatewayProcess(tmp_path / "g", stack, config=config, **settings)
    with pytest.raises(AssertionError, match=reason):
        gateway.__enter__()
    assert gateway.process.returncode == 2


def test_an_open_gateway_gets_keys_and_keeps_them(stack: Stack, tmp_path: Path) -> None:
    """All workers require keys, also one that starts after the file is changed back."""
    config = tmp_path / "c.yaml"
    config.write_text("anonymous: true\n")
    settings = {"config": config, "workers": 2, "redis_url": stack.redis, **ALLOWED}
    with GatewayProcess(tmp_path / "g", stack, **settings) as gateway:
        assert "NO KEYS ARE CONFIGURED" in gateway.text
        assert httpx.get(f"{gateway.url}/v1/models", timeout=PATIENCE_S).status_code == 200
        write_config(config, tenant("acme", KEY))
        gateway.process.send_signal(signal.SIGHUP)
        gateway.wait_for("is in force", 2, within_s=HANGS_AFTER_S)
        config.write_text("anonymous: true\n")
        gateway.process.send_signal(signal.SIGHUP)
        gateway.wait_for(REFUSED, 2, within_s=HANGS_AFTER_S)

        workers = psutil.Process(gateway.process.pid).children()
        victim = min(worker.pid for worker in workers)
        os.kill(victim, signal.SIGKILL)
        # The new worker refuses the file and is started again. The other worker continues to serve.
        gateway.wait_for("ended with 2; starting another", within_s=HANGS_AFTER_S)
        assert gateway.process.poll() is None
        for _ in range(20):  # both workers are likely to get a connection
            assert httpx.get(f"{gateway.url}/v1/models", timeout=PATIENCE_S).status_code == 401
        write_config(config, tenant("acme", KEY))
        _until(lambda: len(_listening(gateway)) == 2)
        assert _asks_for_keys(gateway)


def _listening(gateway: GatewayProcess) -> list[psutil.Process]:
    """Return the workers that have loaded the tokenizer and serve."""
    workers = psutil.Process(gateway.process.pid).children()
    return [worker for worker in workers if worker.is_running() and worker.net_connections("unix")]


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_AFTER_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)
