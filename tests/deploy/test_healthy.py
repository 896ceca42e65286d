"""deploy/image/healthy, the image's health check, against a real gateway."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ops.commands.up import DEMO_MODEL
from ops.local_stack.ports import PortClaims
from tests.support.authority import Authority
from tests.support.forked_gateway import ForkedGateway
from tests.support.patience import PATIENCE_S

HEALTHY = Path(__file__).parents[2] / "deploy/image/healthy"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
WITHIN = 120.0  # seconds, only for a test that hangs


@contextmanager
def _gateway(folder: Path, **settings: str) -> Iterator[tuple[ForkedGateway, dict[str, str]]]:
    """Yield a gateway without a Triton, and the environment variables for its health check."""
    with PortClaims() as claims:
        port, nobody = claims.take_free(), claims.take_free()
    fields = {
        "PORT": str(port),
        "TOKENIZER_DIR": str(DEMO_MODEL),
        "TRITON_GRPC": f"127.0.0.1:{nobody}",
        "STORE_DIR": str(folder / "store"),
        "ALLOW_ANONYMOUS": "true",
        **settings,
    }
    environment = {"PATH": PATH} | {f"GATEWAY_{name}": text for name, text in fields.items()}
    process = ForkedGateway(environment, folder / "gateway.log")
    try:
        yield process, environment
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def _code(path: str, environment: dict[str, str]) -> int:
    return subprocess.run(
        [HEALTHY, path], env=environment, stderr=subprocess.DEVNULL, check=False
    ).returncode


def _until_live(process: ForkedGateway, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + WITHIN
    while _code("/health/live", environment):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_it_is_right_about_what_is_answered(tmp_path: Path) -> None:
    with _gateway(tmp_path) as (process, environment):
        _until_live(process, environment)
        # No Triton is running.
        assert _code("/health/ready", environment) == 1
        assert _code("/no/such/path", environment) == 1
        process.send_signal(signal.SIGSTOP)
        # The stopped process answers nothing, though the kernel accepts connections.
        assert _code("/health/live", environment) == 1
    assert _code("/health/live", environment) == 1


@pytest.mark.parametrize("knows_clients", [False, True])
def test_it_speaks_tls_where_the_gateway_does(tmp_path: Path, knows_clients: bool) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("gateway")
    settings = {"TLS_CERT": str(certificate), "TLS_KEY": str(key)}
    if knows_clients:
        settings["TLS_CLIENT_CA"] = str(authority.file)
    with _gateway(tmp_path, **settings) as (process, environment):
        _until_live(process, environment)
        with pytest.raises(httpx.TransportError):
            httpx.get(
                f"http://127.0.0.1:{environment['GATEWAY_PORT']}/health/live", timeout=PATIENCE_S
            )
        process.send_signal(signal.SIGSTOP)
        assert _code("/health/live", environment) == 1


def test_it_costs_less_than_a_start_of_python(tmp_path: Path) -> None:
    """Compare the lowest CPU time of ten runs each, since other processes distort some runs."""

    def cost(command: list[str | Path]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    with _gateway(tmp_path) as (process, environment):
        _until_live(process, environment)
        checks = min(cost([HEALTHY, "/health/live"]) for _ in range(10))
        starts = min(cost([sys.executable, "-I", "-S", "-c", "pass"]) for _ in range(10))
    assert checks < starts / 2
