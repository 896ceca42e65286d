"""A gateway finds the state of earlier releases on disk, in Redis, or in both."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.released.state import FOUND, GATEWAYS, REDIS, RELEASED, STATE, gateway, read, restore
from tests.support.adapter_store import becomes
from tests.support.redis_server import RedisServer

RELEASES = sorted(path.name for path in RELEASED.iterdir())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("where", ["both", "disk", "redis"])
async def test_all_is_found(
    tmp_path: Path, redis_server: RedisServer, release: str, where: str
) -> None:
    """Check each combination: disk alone, as after a flush of Redis, and Redis alone, as in a new
    pod.
    """
    recorded = RELEASED / release
    folder = tmp_path / "gateway"
    folder.mkdir()
    if where != "redis":
        with tarfile.open(recorded / STATE) as archive:
            archive.extractall(folder)
    if where != "disk":
        with redis_server.client() as at_redis:
            restore(at_redis, json.loads((recorded / REDIS).read_text("utf-8")))
    expected = json.loads((recorded / FOUND).read_text("utf-8"))
    async with gateway(folder, redis_server.url) as (client, _):
        if where == "disk":
            # The gateway waits for the one that recorded the state. An operator removes that one's
            # name.
            with redis_server.client() as at_redis:
                await becomes(lambda: at_redis.hdel(GATEWAYS, expected["gateway"]))
        assert await read(client, expected["names"]) == expected["found"]
