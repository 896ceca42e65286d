"""Failovers of Redis that two processes notice at different times, without loss of records."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gateway.conversations import store as store_module
from gateway.conversations.record import DELETED, FINAL, Record
from gateway.conversations.shared import SharedConversations
from lora_store import redis_role
from lora_store.primary import RedisUnavailable
from ops.local_stack.ports import LOCALHOST
from tests.support.conversations import TENANT_BYTES, following, until
from tests.support.moved_redis import Forwarder, one_address
from tests.support.redis_fleet import PASSWORD, Process, running_sentinels
from tests.support.redis_fleet import until as sync_until

TIMEOUT_S = 6.0
PREFIX = "conversations:{.t}:r:"


async def test_what_a_slower_worker_gives_the_old_primary_reaches_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No late write is lost, and no deleted record is found again, at another gateway."""
    monkeypatch.setattr(store_module, "_RESTORE_TIMEOUT_S", 60)
    with one_address(Process.binary) as redis:
        old, new = redis.servers
        of_slower = Forwarder(old.port)
        slower_url = f"redis://:{PASSWORD}@{LOCALHOST}:{of_slower.port}/0"
        # The worker that starts first does the uploads.
        async with (
            following(tmp_path / "1", redis.url, redis_timeout_s=TIMEOUT_S) as quicker,
            following(tmp_path / "1", slower_url, redis_timeout_s=TIMEOUT_S) as slower,
        ):
            conversation = Record("conv_1", b"head")
            kept = [Record(f"resp_{n}", b"data", FINAL) for n in range(3)]
            await quicker.put("t", [conversation, *kept[:2]])
            at_new = new.client()
            await until(lambda: at_new.exists(f"{PREFIX}resp_1"))
            at_new.execute_command("REPLICAOF", "NO", "ONE")
            at_new.delete(f"{PREFIX}resp_0")
            redis.forwarder.target = new.port
            redis.forwarder.cut()
            # the quicker worker uploaded the record
            await until(lambda: at_new.exists(f"{PREFIX}resp_0"))

            item = Record("i1", b"item", 0, "conv_1", 1)
            await slower.put("t", [kept[2], item])
            await slower.delete("t", ["resp_1"])
            assert old.client().exists(f"{PREFIX}resp_2")
            assert not at_new.exists(f"{PREFIX}resp_2")
            of_slower.target = new.port
            old.client().execute_command("REPLICAOF", LOCALHOST, new.port)
            await until(lambda: at_new.exists(f"{PREFIX}resp_2", f"{PREFIX}i1") == 2)
            await until(lambda: str(at_new.get(f"{PREFIX}resp_1")).endswith("\\n'"))
            async with following(tmp_path / "2", redis.url, redis_timeout_s=TIMEOUT_S) as another:
                found = await another.get("t", ["resp_0", "resp_1", "resp_2"])
                assert found == [kept[0], None, kept[2]]
                assert await another.members("t", "conv_1") == [item]
        of_slower.close()


@pytest.mark.slow
def test_no_put_is_acknowledged_by_a_primary_that_sentinels_have_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Switch off the periodic role checks. A role is then checked only when a connection is opened,
    # so the put itself has to notice the demotion.
    monkeypatch.setattr(redis_role, "ROLE_CHECK_S", math.inf)
    with running_sentinels(stubborn=True) as fleet:
        bounds = {"ttl_ms": 10**6, "tenant_bytes": TENANT_BYTES, "renew_ms": 10**5}
        one, two = [SharedConversations(fleet.url, timeout_s=30, **bounds) for _ in range(2)]
        for shared in (one, two):
            assert shared.put("t", [Record("resp_1", b"data", FINAL)]).accepted
        old = fleet.master()
        assert old is not None
        fleet.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", "gate way")
        # Wait until SENTINEL MASTERS shows the new master. Sentinels return its address earlier.
        sync_until(
            lambda: all(
                each.client().sentinel_masters()["gate way"]["port"] != old.port
                for each in fleet.sentinels
            )
        )
        for shared, late in (
            (one, Record("resp_2", b"data", FINAL)),
            (two, Record("resp_1", b"", DELETED)),
        ):
            with pytest.raises(RedisUnavailable, match="replica"):
                shared.put("t", [late])
            assert shared.put("t", [late]).accepted  # sent to the new primary
            shared.close()
