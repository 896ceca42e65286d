"""The Compose profile `monitoring`: Prometheus finds the services and loads its alerts.

Grafana is left out: without an image registry there is no package of it.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.containers.compose import Project, assert_without_rights
from tests.containers.engine import Engine
from tests.containers.gpu import Deployment


def test_prometheus_scrapes_what_runs(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    deployment = Deployment(tmp_path_factory.mktemp("monitoring"))
    with deployment.up(engine, "monitoring") as compose:
        # A second call of `up`, so that Prometheus alone of the profile starts.
        compose.set(COMPOSE_PROFILES="gpu,monitoring")
        compose.up("prometheus")
        deadline = time.monotonic() + 120
        wanted = {"gateway": "1", "triton": "1"}
        while (found := _up(compose)) != wanted:
            assert time.monotonic() < deadline, found
            time.sleep(1)
        rules = _asked(compose, "rules")["groups"]
        assert rules
        assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}
        assert_without_rights(compose, "prometheus", user="65534")


def _up(compose: Project) -> dict[str, str]:
    """Return by job the result of the last scrape: "1" if it succeeded, else "0"."""
    results = _asked(compose, "query?query=up")["result"]
    return {result["metric"]["job"]: result["value"][1] for result in results}


def _asked(compose: Project, path: str) -> Any:
    url = f"http://127.0.0.1:9090/api/v1/{path}"
    program = f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())"
    return json.loads(compose.exec("prometheus", "python3", "-c", program))["data"]
