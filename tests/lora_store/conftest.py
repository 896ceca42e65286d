"""A `RedisTier` fixture over a separate redis-server per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lora_store.redis import RedisTier
from tests.support.redis_server import RedisServer


@pytest.fixture
def tier(redis_server: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(redis_server.settings())
    yield tier
    tier.close()
