"""Several processes on one port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from ops.commands.up import DEMO_MODEL
from ops.local_stack.ports import PortClaims
from tests.support.local_stack import Stack
from tests.support.metrics import metric

pytestmark = pytest.mark.timed


class _Gateway:
    def __init__(self, stack: Stack, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "gateway.log"
        settings = {
            "GATEWAY_PORT": str(port),
            "GATEWAY_WORKERS": "2",
            "GATEWAY_REDIS_URL": stack.redis,
            "GATEWAY_TRITON_GRPC": stack.triton_grpc,
            "GATEWAY_TOKENIZER_DIR": str(DEMO_MODEL),
            "GATEWAY_STORE_DIR": str(folder / "store"),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway"], env=os.environ | settings, stderr=log
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(self.url + "/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def ask(self) -> None:
        body = {"model": "demo", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(self.url + "/v1/completions", json=body).status_code == 200


@pytest.fixture
def gateway(stack: Stack, tmp_path: Path) -> Iterator[_Gateway]:
    with PortClaims() as claims:
        port = claims.take_free()
    gateway = _Gateway(stack, tmp_path, port)
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.process.kill()
        gateway.process.wait()


def test_metrics_are_those_of_all_workers(gateway: _Gateway) -> None:
    for _ in range(40):
        gateway.ask()
    url, name = gateway.url + "/metrics", "gateway_completion_tokens_total"
    counted = [metric(url, name, worker=str(worker)) for worker in range(2)]
    assert sum(counted) == 160
    assert 'worker="1"' in httpx.get(url).text


def test_a_worker_that_dies_is_replaced(gateway: _Gateway) -> None:
    time.sleep(1.1)
    before = {worker.pid for worker in gateway.workers()}
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while {w.pid for w in gateway.workers() if w.status() != "zombie"} <= before:
        assert time.monotonic() < deadline, gateway.log.read_text()
        time.sleep(0.05)
    gateway.wait_ready()
    gateway.ask()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(gateway: _Gateway, number: signal.Signals) -> None:
    workers = gateway.workers()
    gateway.process.send_signal(number)
    assert gateway.process.wait(20) == (0 if number is signal.SIGTERM else -number)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_workers_without_redis_are_refused(tmp_path: Path) -> None:
    settings = {"GATEWAY_WORKERS": "2", "GATEWAY_TOKENIZER_DIR": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-m", "gateway"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert answer.returncode == 2
    assert "GATEWAY_REDIS_URL" in answer.stderr
