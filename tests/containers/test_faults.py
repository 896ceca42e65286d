"""Each container killed, paused and disconnected: the clients' answers, and the recovery."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.containers.compose import ADMIN, API, Project, completion, reaches
from tests.containers.engine import Engine
from tests.containers.gpu import Deployment, bearer
from tests.support.patience import PATIENCE_S

CAPITAL = "The capital of France is"
SPARE = ("redis", "postgres")
"""Services that answers of known models to known keys do not need."""
Up = tuple[Deployment, Project]


@pytest.fixture(scope="module")
def up(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    deployment = Deployment(tmp_path_factory.mktemp("faults"))
    with deployment.up(engine, "faults") as compose:
        assert deployment.add_adapter("zh", "zh").status_code == 201
        yield deployment, compose


@pytest.mark.parametrize("service", [*SPARE, "triton", "gateway"])
def test_killed(up: Up, service: str) -> None:
    """Check that a service killed with SIGKILL is restarted, as after running out of memory."""
    deployment, compose = up
    before = compose.container(service)["State"]
    os.kill(before["Pid"], signal.SIGKILL)
    answer = _asked(deployment) if service in SPARE else None
    _until(lambda: compose.container(service)["State"]["StartedAt"] != before["StartedAt"])
    _until(lambda: _answers(deployment))
    # The gateway has the adapter's name and the keys in memory, so it needs no Redis or PostgreSQL.
    assert answer is None or answer.status_code == 200
    assert completion("zh", CAPITAL, headers=bearer(deployment.acme)) == "巴黎"
    compose.up()  # all services are healthy again


@pytest.mark.parametrize("service", [*SPARE, "triton", "gateway"])
def test_paused(up: Up, engine: Engine, service: str) -> None:
    """Check that a pause refuses and closes nothing: waiting requests are answered after it."""
    deployment, compose = up
    name = compose.container(service)["Name"].lstrip("/")
    with ThreadPoolExecutor(1) as others:
        engine.docker("pause", name)
        asked = others.submit(_asked, deployment)
        # Limits and adapter names do not depend on Redis' answer.
        answered = asked.result(60) if service in SPARE else None
        time.sleep(3)
        assert answered is not None or not asked.done()
        engine.docker("unpause", name)
        assert asked.result(60).status_code == 200
    _until(lambda: _answers(deployment))
    assert "never retrieved" not in compose("logs", "gateway")


@pytest.mark.parametrize("service", [*SPARE, "triton"])
def test_cut_off(up: Up, engine: Engine, service: str) -> None:
    deployment, compose = up
    name, network = compose.container(service)["Name"].lstrip("/"), compose.named("engine")
    engine.docker("network", "disconnect", network, name)
    try:
        answer = _asked(deployment)
        if service in SPARE:
            assert answer.status_code == 200, answer.text
        else:
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["type"] == "server_error"
            # While Triton is unavailable, requests are refused soon.
            began = time.monotonic()
            assert _asked(deployment).status_code == 503
            assert time.monotonic() - began < 15
            _until(lambda: httpx.get(f"{API}/health/ready", timeout=PATIENCE_S).status_code == 503)
            # The name lookup fails, and takes longer than the connect timeout.
            _until(lambda: compose("logs", "gateway").count("engine not ready") >= 3)
        assert httpx.get(f"{API}/health/live", timeout=PATIENCE_S).status_code == 200
    finally:
        engine.docker("network", "connect", "--alias", service, network, name)
    _until(lambda: _answers(deployment))
    assert completion("zh", CAPITAL, headers=bearer(deployment.acme)) == "巴黎"
    # Asyncio reports "never retrieved" for tasks whose errors are ignored.
    assert "never retrieved" not in compose("logs", "gateway")


def test_without_the_database(up: Up, engine: Engine) -> None:
    """Kill PostgreSQL, which Docker then does not restart, and the gateway, which it does."""
    deployment, compose = up
    made = deployment.make_key()
    assert made.status_code == 201, made.text
    key = made.json()["value"]
    engine.docker("kill", compose.container("postgres")["Name"].lstrip("/"))
    try:
        assert completion("zh", CAPITAL, headers=bearer(key)) == "巴黎"
        refused = deployment.make_key()
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "database_unavailable"
        assert "retry-after" in refused.headers
        assert httpx.get(f"{API}/health/ready", timeout=PATIENCE_S).status_code == 200

        before = compose.container("gateway")["State"]
        os.kill(before["Pid"], signal.SIGKILL)
        _until(lambda: compose.container("gateway")["State"]["StartedAt"] != before["StartedAt"])
        # This process serves the keys of its file, and knows no others yet.
        _until(lambda: _answers(deployment))
        unknown = _asked(deployment, key)
        assert unknown.status_code == 503, unknown.text
        assert unknown.json()["error"]["code"] == "database_unavailable"
    finally:
        compose.up()
    _until(lambda: deployment.make_key().status_code == 201)
    assert completion("zh", CAPITAL, headers=bearer(key)) == "巴黎"
    assert "never retrieved" not in compose("logs", "gateway")


def test_the_gateway_cut_off_from_its_clients(up: Up, engine: Engine) -> None:
    """Disconnect the gateway from its clients' network, and reconnect it.

    Streams end, the gateway stays ready, and its name resolves again afterwards. The host's
    published port may still work meanwhile, since Docker can route it over the other network.
    """
    deployment, compose = up
    name, network = compose.container("gateway")["Name"].lstrip("/"), compose.named("edge")
    asked = {"model": "demo", "prompt": "Count", "max_tokens": 1500, "ignore_eos": True}
    asked["stream"] = True
    headers = bearer(deployment.acme)
    with httpx.stream(
        "POST", f"{API}/v1/completions", json=asked, headers=headers, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        engine.docker("network", "disconnect", network, name)
        try:
            with pytest.raises(httpx.TransportError):
                list(lines)
            assert not reaches(engine, network, "gateway", 9000)
            compose.exec("gateway", "healthy", "/health/ready")
        finally:
            engine.docker("network", "connect", "--alias", "gateway", network, name)
    assert reaches(engine, network, "gateway", 9000)
    _until(lambda: _answers(deployment))
    assert completion("zh", CAPITAL, headers=bearer(deployment.acme)) == "巴黎"
    _until(lambda: _metric("gateway_generations_in_flight") == 0)


def _metric(name: str) -> float:
    text = httpx.get(f"{ADMIN}/metrics", timeout=PATIENCE_S).raise_for_status().text
    [value] = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(value)


def _asked(deployment: Deployment, key: str = "") -> httpx.Response:
    asked = {"model": "zh", "prompt": CAPITAL, "temperature": 0}
    headers = bearer(key or deployment.acme)
    return httpx.post(f"{API}/v1/completions", json=asked, headers=headers, timeout=60)


def _answers(deployment: Deployment) -> bool:
    try:
        return _asked(deployment).status_code == 200
    except httpx.TransportError:
        return False


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)
