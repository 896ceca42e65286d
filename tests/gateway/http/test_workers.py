"""Several worker processes on one port."""

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

from tests.support.gateway_process import GatewayProcess, body
from tests.support.local_stack import Stack
from tests.support.metrics import metric, sample
from tests.support.patience import PATIENCE_S

HANGS_AFTER_S = 300


def _gateway(stack: Stack, folder: Path) -> GatewayProcess:
    return GatewayProcess(folder, stack, workers=2, redis_url=stack.redis)


@pytest.fixture(scope="module")
def gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with _gateway(stack, tmp_path_factory.mktemp("workers")) as gateway:
        yield gateway


def _workers(gateway: GatewayProcess) -> list[psutil.Process]:
    return psutil.Process(gateway.process.pid).children()


def _wait_both_ready(gateway: GatewayProcess) -> None:
    """Wait for both workers, because the gateway answers as soon as one worker is ready."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while metric(gateway.url + "/metrics", "gateway_engine_ready") < 2:
        assert time.monotonic() < deadline, gateway.text
        time.sleep(0.05)


def _ask(gateway: GatewayProcess) -> None:
    with gateway.client() as client:
        wanted = body(max_tokens=4, ignore_eos=True)
        assert client.post("/v1/completions", json=wanted).status_code == 200


def test_metrics_are_those_of_all_workers(gateway: GatewayProcess) -> None:
    _wait_both_ready(gateway)
    for _ in range(40):
        _ask(gateway)
    # A worker that gets no CPU for a while is missing on the other worker's page, so repeat.
    deadline = time.monotonic() + HANGS_AFTER_S
    while 'worker="1"' not in (
        page := httpx.get(f"{gateway.url}/metrics", timeout=PATIENCE_S).text
    ):
        assert time.monotonic() < deadline, page
        time.sleep(0.05)
    name = "gateway_completion_tokens_total"
    counted = [sample(page, name, worker=str(worker)) for worker in range(2)]
    assert sum(counted) == 160


def test_a_worker_that_dies_is_replaced(gateway: GatewayProcess) -> None:
    _wait_both_ready(gateway)
    before = {worker.pid for worker in _workers(gateway)}
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    deadline = time.monotonic() + HANGS_AFTER_S
    while {worker.pid for worker in _workers(gateway)} <= before:
        assert time.monotonic() < deadline, gateway.text
        time.sleep(0.05)
    _wait_both_ready(gateway)
    _ask(gateway)


def test_workers_are_forked_from_a_process_without_other_threads(gateway: GatewayProcess) -> None:
    """A lock that another thread held during the fork would stay locked in the worker."""
    assert psutil.Process(gateway.process.pid).num_threads() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with _gateway(stack, tmp_path / "g") as gateway:
        workers = _workers(gateway)
        [folder] = tmp_path.glob("gateway-*")
        gateway.process.send_signal(number)
        code = gateway.process.wait(HANGS_AFTER_S)
        assert code == (0 if number is signal.SIGTERM else -number)
        _, alive = psutil.wait_procs(workers, timeout=HANGS_AFTER_S)
        assert not alive
        assert not folder.exists()


def test_workers_without_redis_are_refused(tmp_path: Path) -> None:
    settings = {"GATEWAY_WORKERS": "2", "GATEWAY_TOKENIZER_DIR": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-m", "gateway"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_AFTER_S,
    )
    assert answer.returncode == 2
    assert "GATEWAY_REDIS_URL" in answer.stderr


_REAPED_AS_THE_SIGNAL_COMES = """
import os, signal, sys
from pathlib import Path
from gateway.http.workers import Workers

real, parent = os.waitpid, os.getpid()

def waitpid(pid, options):
    found = real(pid, options)
    if found[0]:
        os.kill(parent, signal.SIGTERM)
    return found

os.waitpid = waitpid
sys.exit(Workers(1, [], Path(sys.argv[1]), lambda worker: 0).run())
"""


def test_a_signal_while_a_workers_end_is_noted(tmp_path: Path) -> None:
    """The worker has no process id any more, and multiprocessing does not know that yet."""
    command = [sys.executable, "-c", _REAPED_AS_THE_SIGNAL_COMES, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, timeout=HANGS_AFTER_S, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
