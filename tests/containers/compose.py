"""docker-compose.yml as a user runs it, as a separate project with its own volumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.containers.engine import Engine
from tests.containers.images import COMPOSE, PYTHON

API = "http://127.0.0.1:9000"
ADMIN = "http://127.0.0.1:9001"
GIVE_UP_AFTER = "600"
"""Timeout of `up` in seconds, only for services that hang.

On two busy cores, Triton alone once took four minutes to start. A service that exits or is
unhealthy ends `up` earlier.
"""

_FILL = "head --bytes=1G /dev/zero > {0}/filler; [ $(df --output=avail {0} | tail -n 1) = 0 ]"


class Project:
    """A Compose project. Calling it runs a `docker compose` command and returns the output."""

    def __init__(self, engine: Engine, name: str, *overrides: Path, **variables: str) -> None:
        """Set up a project: `overrides` are further Compose files, `variables` those of .env."""
        self._engine = engine
        self._name = name
        self._files = [word for file in overrides for word in ("--file", file)]
        self._variables = variables

    def __call__(self, *arguments: str, stdin: str = "") -> str:
        command = [*COMPOSE, *self._files, "--project-name", self._name, *arguments]
        return self._engine.docker(*command, stdin=stdin, **self._variables)

    def set(self, **variables: str) -> None:
        """Set variables for the commands that follow."""
        self._variables |= variables

    def up(self, *services: str) -> None:
        """Start the services, and return when they are healthy."""
        self("up", "--detach", "--wait", "--wait-timeout", GIVE_UP_AFTER, *services)

    def exec(self, service: str, *command: str, stdin: str = "") -> str:
        return self("exec", "--no-TTY", service, *command, stdin=stdin)

    def container(self, service: str) -> Any:
        """Return `docker inspect` of the service's only container."""
        [name] = self("ps", "--all", "--quiet", service).split()
        return self._engine.inspect(name)

    def address(self, service: str, network: str) -> str:
        """Return the service's IP address in the network."""
        networks = self.container(service)["NetworkSettings"]["Networks"]
        return str(networks[self.named(network)]["IPAddress"])

    def named(self, name: str) -> str:
        """Return the engine's name for a network or volume of the project."""
        return f"{self._name}_{name}"


@contextmanager
def full(compose: Project, service: str, folder: str) -> Iterator[None]:
    """Fill the service's volume at `folder`, which must be small, and empty it at the end."""
    compose.exec(service, "sh", "-c", _FILL.format(folder))
    try:
        yield
    finally:
        compose.exec(service, "rm", f"{folder}/filler")


@contextmanager
def project(engine: Engine, name: str, *overrides: Path, **variables: str) -> Iterator[Project]:
    """Yield a project that is not started. Print its logs on failure, and remove it at the end."""
    made = Project(engine, name, *overrides, **variables)
    try:
        yield made
    except BaseException:
        print(made("ps", "--all"), made("logs", "--no-color", "--tail", "30"), sep="\n")
        raise
    finally:
        made("down", "--volumes", "--timeout", "5")


def reaches(engine: Engine, network: str, host: str, port: int) -> bool:
    """Return True if a container of the network can connect to the host and port."""
    program = f"import socket; socket.create_connection(({host!r}, {port}), 3); print('reached')"
    run = ["container", "run", "--rm", "--network", network, PYTHON]
    return "reached" in engine.docker(*run, "sh", "-c", 'python3 -c "$0" 2>&1 || true', program)


def completion(model: str, prompt: str, url: str = API, **options: Any) -> str:
    """Return the text of a greedy completion. Raises httpx.HTTPError for other statuses."""
    headers = options.pop("headers", {})
    asked = {"model": model, "prompt": prompt, "temperature": 0, **options}
    answer = httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=60)
    answer.raise_for_status()
    return str(json.loads(answer.text)["choices"][0]["text"])


def assert_without_rights(
    compose: Project, service: str, user: str, read_only: bool = True
) -> None:
    """Check that the service runs as `user` without capabilities, with a read-only root file
    system.
    """
    host = compose.container(service)["HostConfig"]
    assert (host["CapDrop"], host["Privileged"]) == (["ALL"], False)
    assert host["ReadonlyRootfs"] == read_only
    status = dict(
        line.split(":", 1) for line in compose.exec(service, "cat", "/proc/1/status").splitlines()
    )
    assert set(status["Uid"].split()) == {user}
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
