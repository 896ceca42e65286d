"""What tests of pages share: the browser, and a gateway with two engines for operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import browser
from tests.support.operated_gateway import OperatedGateway, run_operated_gateway

__all__ = ["browser"]


@pytest.fixture(scope="package")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedGateway]:
    with run_operated_gateway(tmp_path_factory.mktemp("operated")) as two_engines:
        yield two_engines


@pytest.fixture
def real(two_engines: OperatedGateway) -> Iterator[OperatedGateway]:
    """Its replicas are as the configuration has them, before each test and after."""
    yield two_engines
    two_engines.give_back()
