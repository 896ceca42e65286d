"""What is wrong around a gateway is said at its start, in a line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import running, save_tokenizer
from tests.support.redis_server import running_redis

NOBODY = "127.0.0.1:1"
SECRET = "wrong-and-secret"


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (f"?password={SECRET}", "it refuses the user or password of its URL"),
        (f"?username=bob&password={SECRET}", "it refuses the user or password of its URL"),
        ("", "it refuses the user or password of its URL"),
        (".not", "no such file or directory"),
    ],
)
async def test_a_redis_that_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, query: str, why: str
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "redis.conf").write_text("requirepass right\n")
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme"))
    with running_redis(tmp_path / "redis.conf") as redis:
        settings = {"redis_url": redis.url + query, "config": config}
        async with running(tmp_path, NOBODY, ready=False, **settings):
            pass
    said = [record.getMessage() for record in caplog.records if why in record.getMessage()]
    assert said == [
        f"Redis is away, going on from disk: Redis cannot be used: {why}",
        f"KEYS MADE OVER THE API ARE NOT TAKEN YET: {why}",
        f"Redis is away ({why}); limits are counted as when_redis_is_away says",
    ]
    assert SECRET not in caplog.text
