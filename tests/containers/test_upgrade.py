"""Two gateways behind one name, replaced by two of a new image without failed requests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.containers.compose import Project
from tests.containers.engine import Engine
from tests.containers.gpu import Deployment
from tests.containers.images import PYTHON

CLIENT = Path(__file__).parent / "client.py"
NEXT = "triton-openai-gateway:next"


def test_a_rolling_upgrade_loses_no_request(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    deployment = Deployment(tmp_path_factory.mktemp("upgrade"))
    engine.docker("tag", "triton-openai-gateway:latest", NEXT)
    # A port range, as each container needs its own port on the host.
    ports = {"PUBLISH_API": "127.0.0.1:9000-9003", "PUBLISH_ADMIN": "127.0.0.1:9100-9103"}
    with deployment.up(engine, "upgrade", **ports) as compose:
        _scale(compose, 2)
        old = compose("ps", "--quiet", "gateway").split()
        assert len(old) == 2
        client = engine.docker(
            *("container", "run", "--detach", "--network", compose.named("edge")),
            *("--volume", f"{CLIENT}:/client.py:ro", "--env", f"KEY={deployment.acme}"),
            *(PYTHON, "python3", "-u", "/client.py", "http://gateway:9000"),
        ).strip()
        try:
            _until_counted(engine, client, 20)
            compose.set(GATEWAY_IMAGE=NEXT)
            # The tables first. The old gateways continue to use them.
            compose("run", "--rm", "database-upgrade")
            _scale(compose, 4)  # starts two healthy containers of the new image
            for container in old:
                engine.docker("stop", "--time", "45", container)
                engine.docker("rm", container)
            _scale(compose, 2)
            seen = _counted(engine, client)
            _until_counted(engine, client, seen["answered"] + 20)
            engine.docker("stop", client)
            found = _counted(engine, client)
        finally:
            engine.docker("rm", "--force", client)
        new = compose("ps", "--quiet", "gateway").split()
        assert len(new) == 2
        assert not set(new) & set(old)
        images = {engine.inspect(name)["Config"]["Image"] for name in new}
        assert images == {NEXT}
        assert found["lost"] == []


def _scale(compose: Project, count: int) -> None:
    compose.up("--no-recreate", "--scale", f"gateway={count}")


def _counted(engine: Engine, client: str) -> Any:
    lines = engine.docker("logs", client).splitlines()
    return json.loads(lines[-1]) if lines else {"answered": 0, "lost": []}


def _until_counted(engine: Engine, client: str, count: int) -> None:
    deadline = time.monotonic() + 120
    while (found := _counted(engine, client))["answered"] < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
