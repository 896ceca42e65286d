"""Fixtures for tests of web pages: the browser, and a gateway with two engines for operators."""

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
    """Yield a gateway whose replicas are as configured, before and after each test."""
    yield two_engines
    two_engines.give_back()
