"""Full volumes of each container: stored data is served, and all recover."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.containers.compose import ADMIN, API, Project, completion, full
from tests.containers.engine import Engine
from tests.containers.gpu import Deployment, bearer
from tests.support.patience import PATIENCE_S

CAPITAL = "The capital of France is"
SMALL = Path(__file__).parent / "small_disks.yaml"
Up = tuple[Deployment, Project]


@pytest.fixture(scope="module")
def up(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    deployment = Deployment(tmp_path_factory.mktemp("full"))
    with deployment.up(engine, "full", SMALL) as compose:
        assert deployment.add_adapter("zh", "zh").status_code == 201
        yield deployment, compose


def test_the_gateways(up: Up) -> None:
    deployment, compose = up
    with full(compose, "gateway", "/var/lib/gateway"):
        assert _text(deployment, "zh") == "巴黎"
        refused = deployment.add_adapter("ja", "ja")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            500,
            "adapter_store_error",
        )
        assert "404" in _text(deployment, "ja")
        assert httpx.get(f"{API}/health/ready", timeout=PATIENCE_S).status_code == 200
    added = deployment.add_adapter("ja", "ja")
    assert added.status_code == 201, added.text
    assert _text(deployment, "ja") == "パリ"


def test_redis(up: Up) -> None:
    """Check a full Redis: writes fail, and each gateway counts limits by itself."""
    deployment, compose = up
    assert _limited(deployment) == 200
    assert _metric("gateway_limits_shared") == 1
    with full(compose, "redis", "/data"):
        _until(lambda: "MISCONF" in _redis(compose, "set", "anything", "1"))
        assert _limited(deployment) == 200
        _until(lambda: _limited(deployment) in (200, 429) and _metric("gateway_limits_shared") == 0)
        assert _text(deployment, "zh") == "巴黎"
        assert httpx.get(f"{API}/health/ready", timeout=PATIENCE_S).status_code == 200
    _until(lambda: "OK" in _redis(compose, "set", "anything", "1"))
    _until(lambda: _limited(deployment) in (200, 429) and _metric("gateway_limits_shared") == 1)
    assert deployment.add_adapter("again", "zh").status_code == 201
    assert _text(deployment, "again") == "巴黎"


def test_postgresql(up: Up) -> None:
    """Check a full PostgreSQL: as soon as it cannot store keys, they are refused."""
    deployment, compose = up
    key = deployment.make_key().json()["value"]
    with full(compose, "postgres", "/var/lib/postgresql"):
        # Rows go to allocated pages and files of the log as long as there are any.
        _until(lambda: deployment.make_key().status_code == 503)
        assert completion("zh", CAPITAL, headers=bearer(key)) == "巴黎"
        assert _text(deployment, "zh") == "巴黎"
        assert httpx.get(f"{API}/health/ready", timeout=PATIENCE_S).status_code == 200
    _until(lambda: deployment.make_key().status_code == 201)
    assert completion("zh", CAPITAL, headers=bearer(key)) == "巴黎"


def test_tritons(up: Up) -> None:
    """Check a full Triton: its disk has no data that answers need, even those of a new adapter."""
    deployment, compose = up
    with full(compose, "triton", "/tmp"):
        assert _text(deployment, "zh") == "巴黎"
        added = deployment.add_adapter("late", "ja")
        assert added.status_code == 201, added.text
        assert _text(deployment, "late") == "パリ"
        assert httpx.get(f"{API}/health/ready", timeout=PATIENCE_S).status_code == 200
        assert compose.container("triton")["State"]["Health"]["Status"] == "healthy"
    assert _text(deployment, "zh") == "巴黎"


def _limited(deployment: Deployment) -> int:
    """Return the status of a request by the tenant that has a budget."""
    asked = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
    return httpx.post(
        f"{API}/v1/completions", json=asked, headers=bearer(deployment.small), timeout=PATIENCE_S
    ).status_code


def _redis(compose: Project, *command: str) -> str:
    asked = 'REDISCLI_AUTH="$(cat /run/secrets/password)" redis-cli "$@"'
    return compose.exec("redis", "sh", "-c", asked, "redis-cli", *command)


def _text(deployment: Deployment, model: str) -> str:
    try:
        return completion(model, CAPITAL, headers=bearer(deployment.acme))
    except httpx.HTTPError as error:
        return repr(error)


def _metric(name: str) -> float:
    text = httpx.get(f"{ADMIN}/metrics", timeout=PATIENCE_S).raise_for_status().text
    [value] = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return float(value)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)
