"""The Docker engine that all tests of this suite share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from docs.rerun import set_loopback_up
from tests.containers.engine import Engine, running


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Yield a Docker engine in the network namespace that `python -m tests.containers` creates."""
    if "GATEWAY_CONTAINERS" not in os.environ:
        pytest.skip("needs an engine of its own: `make test-containers` starts it")
    set_loopback_up()
    with running() as engine:
        yield engine
