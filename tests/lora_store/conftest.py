"""A Redis of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from lora_store.redis import RedisTier
from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_client(server: RedisServer) -> Iterator[redis.Redis]:
    """To look, to damage, to empty."""
    with server.client() as client:
        yield client


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(server.settings())
    yield tier
    tier.close()
