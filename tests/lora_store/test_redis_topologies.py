"""The adapter store, the limits and a complete gateway on real Redis Sentinels and clusters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from adapters.errors import StoreUnavailable
from gateway.conversations.record import Record
from gateway.conversations.store import Conversations
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import Settlement
from lora_store import redis_url
from lora_store.codec import decode
from lora_store.connect import channel_url, close, connect
from lora_store.redis import RedisSettings, RedisTier
from lora_store.redis_values import StoredRecord, dump
from ops.commands.up import DEMO_MODEL
from tests.support.adapter_store import StoreGateway, becomes, record, store_gateway
from tests.support.event_clock import EventClock
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.generated_adapters import write_adapter
from tests.support.limit_requests import PATIENT_S, limit_request
from tests.support.local_stack import Stack
from tests.support.lora_files import content
from tests.support.redis_fleet import (
    PASSWORD,
    Fleet,
    Process,
    WatchedFleet,
    is_master,
    running_cluster,
    running_sentinels,
    until,
)
from tests.support.redis_server import running_redis

pytestmark = pytest.mark.slow

ADMIN_KEY = "an-admin-key-of-enough-characters"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Fleet]:
    with running_cluster() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def sentinels() -> Iterator[WatchedFleet]:
    with running_sentinels() as fleet:
        yield fleet


@pytest.fixture
def tier(cluster: Fleet) -> Iterator[RedisTier]:
    prefix = f"lora:{random.randbytes(4).hex()}"
    tier = RedisTier(RedisSettings(cluster.url, prefix=prefix, timeout_s=PATIENT_S))
    yield tier
    tier.close()


def gateway(root: Path, fleet: Fleet) -> contextlib.AbstractAsyncContextManager[StoreGateway]:
    """Return the adapter store of one gateway, with a disk folder for that gateway alone."""
    return store_gateway(root, RedisSettings(fleet.url, timeout_s=1.0), poll_s=0.5)


# Redis Cluster


def test_versions_and_records_live_in_a_cluster(cluster: Fleet, tier: RedisTier) -> None:
    big, small = content(1, 5 * 1024 * 1024), content(2)
    tier.put(big)
    tier.put(small)
    chunks = tier.fetch(big.digest)
    assert chunks is not None
    assert bytes(decode(b"".join(chunks), big.digest).weights) == bytes(big.weights)
    assert tier.has([big.digest, small.digest, content(3).digest]) == {big.digest, small.digest}
    assert tier.digests(older_than_s=-1) == {big.digest, small.digest}
    used = [server for server in cluster.servers if server.client().dbsize()]
    assert len(used) == 3, "nothing was spread"
    tier.delete(big.digest)
    assert tier.digests(older_than_s=-1) == {small.digest}
    assert sum(server.client().dbsize() for server in cluster.servers) == 2

    assert tier.swap(None, record())
    before = tier.position()
    assert not tier.swap(None, record(number=2))
    assert tier.position() == before
    new = StoredRecord(dump(record(number=2)), record(number=2))
    assert tier.swap(StoredRecord(dump(record()), record()), record(number=2))
    assert tier.record("zh") == new
    epoch, revision = tier.position()
    assert epoch == before[0]
    assert revision != before[1]
    assert tier.records()[1] == {"zh": new}
    assert tier.claim("d")
    assert not tier.claim("d")
    tier.release("d")
    assert tier.claim("d")


async def test_every_server_of_a_cluster_tells_of_changes(cluster: Fleet, tmp_path: Path) -> None:
    client = connect(redis_url.parse(cluster.url), timeout_s=PATIENT_S, connect_timeout_s=PATIENT_S)
    urls = {channel_url(redis_url.parse(cluster.url), client) for _ in range(100)}
    close(client)
    assert len(urls) == 3
    # Six gateways choose among three servers, so several servers carry the notices.
    async with contextlib.AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(gateway(tmp_path / str(n), cluster)) for n in range(6)
        ]
        await becomes(lambda: _listeners(cluster, "lora:changes") == 6)
        before = [store.store.stats.notices for store in stores]
        await stores[0].registry.add("zh", "demo", content(1), "test")
        await becomes(lambda: all(store.serves("zh") for store in stores))
        await becomes(
            lambda: all(s.store.stats.notices > b for s, b in zip(stores, before, strict=True))
        )
        for store in stores:
            assert await store.holds(1)


def _listeners(fleet: Fleet, channel: str) -> int:
    return sum(int(server.client().pubsub_numsub(channel)[0][1]) for server in fleet.servers)


async def test_limits_are_exact_in_a_cluster(cluster: Fleet) -> None:
    tenants = [f"t{n}" for n in range(10)]
    passed: Counter[str] = Counter()
    async with (
        SharedLimits(cluster.url, timeout_s=PATIENT_S) as one,
        SharedLimits(cluster.url, timeout_s=PATIENT_S) as two,
    ):

        async def ask(limits: SharedLimits, name: str) -> None:
            asked = limit_request(name, requests=5, tokens=10_000, concurrent=100, wanted=10)
            decision = await limits.take(asked)
            assert decision is not None
            passed[name] += decision.refused is None
            if decision.refused is None:
                limits.settle(Settlement(asked, released=10, slots=1))

        await asyncio.gather(*[ask(limits, name) for name in tenants * 10 for limits in (one, two)])
    assert passed == dict.fromkeys(tenants, 5)
    keys = [server.client().keys("limits:{t*") for server in cluster.servers]
    assert {key for found in keys for key in found} == {
        f"limits:{{{name}}}".encode() for name in tenants
    }
    assert all(keys), "all tenants are at one server"
    for server, found in zip(cluster.servers, keys, strict=True):
        for key in found:
            values: Any = server.client().hgetall(key)
            assert not [field for field in values if field.startswith(b"c:")]
            assert sum(int(n) for field, n in values.items() if field.startswith(b"t:")) == 0


async def test_conversations_are_shared_in_a_cluster(cluster: Fleet, tmp_path: Path) -> None:
    bounds = {"ttl_s": 10**6, "tenant_bytes": 2 * 1024 * 1024}
    items = [Record(f"m{n}", b"x", 0, "conv_1", n) for n in range(5)]
    tenants = ["", *(f"tenant-{n}" for n in range(9))]
    async with contextlib.AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(Conversations(tmp_path / name, cluster.url, **bounds))
            for name in "12"
        ]
        for tenant in tenants:
            await one.put(tenant, [Record("conv_1", tenant.encode() + b"'s"), *items])
            for n in range(4):  # the tenant's budget of 2 MiB fits three
                await one.put(tenant, [Record(f"resp_{n}", bytes(600_000))])
            await one.delete(tenant, ["m3"])
        for tenant in tenants:
            ids = ["resp_2", "resp_3", "m3"]
            found = await two.get(tenant, ids)
            assert [each is not None for each in found] == [True, True, False]
        assert one.stats.evicted >= 2 * len(tenants)
        assert (one.stats.redis_failures, two.stats.redis_failures) == (0, 0)


async def test_a_tenant_that_moves_within_a_cluster_is_counted_on(cluster: Fleet) -> None:
    """A moved tenant's requests are counted exactly.

    Its hash slot is moved to another server, which the limits learn from a redirect.
    """
    ask = limit_request("moving", requests=5, day=1000, wanted=10)
    slot = int(cluster.servers[0].client().execute_command("CLUSTER KEYSLOT", "limits:{moving}"))
    async with SharedLimits(cluster.url, timeout_s=PATIENT_S) as limits:
        decisions = [await limits.take(ask) for _ in range(3)]
        source = next(s for s in cluster.servers if s.client().dbsize() and _has(s, slot))
        target = next(s for s in cluster.servers if s is not source)
        _move(cluster, slot, source, target)
        target.client().script_flush()
        decisions += await asyncio.gather(*[limits.take(ask) for _ in range(4)])
        assert limits.up
    found = [decision is not None and decision.refused is None for decision in decisions]
    assert None not in decisions
    assert found.count(True) == 5


def _has(server: Process, slot: int) -> bool:
    count: int = server.client().execute_command("CLUSTER COUNTKEYSINSLOT", slot)
    return count > 0


def _move(cluster: Fleet, slot: int, source: Process, target: Process) -> None:
    identity = {s.port: s.client().execute_command("CLUSTER MYID") for s in (source, target)}
    target.client().execute_command("CLUSTER SETSLOT", slot, "IMPORTING", identity[source.port])
    source.client().execute_command("CLUSTER SETSLOT", slot, "MIGRATING", identity[target.port])
    keys = source.client().execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
    password = target.client().connection_pool.connection_kwargs["password"]
    where = ("127.0.0.1", target.port, "", 0, 60_000, "AUTH", password, "KEYS", *keys)
    source.client().execute_command("MIGRATE", *where)
    for server in cluster.servers:
        server.client().execute_command("CLUSTER SETSLOT", slot, "NODE", identity[target.port])


async def test_a_cluster_goes_on_when_a_master_dies(tmp_path: Path) -> None:
    """Changes still work after the death of the master that has the records.

    Its replica takes over within seconds.
    """
    ask = limit_request("t", requests=1000)
    with running_cluster(replicas=True) as fleet:
        async with gateway(tmp_path / "1", fleet) as one, gateway(tmp_path / "2", fleet) as two:
            async with SharedLimits(fleet.url) as limits:
                await one.registry.add("zh", "demo", content(1), "test")
                await becomes(lambda: two.serves("zh"))
                slot = fleet.servers[0].client().execute_command("CLUSTER KEYSLOT", "lora:names")
                master = next(s for s in fleet.servers[:3] if _has(s, slot))
                master.kill()
                await _asks_until(lambda: limits.take(ask), lambda: not one.store.stats.redis_up)
                await one.registry.add("ja", "demo", content(2), "test")
                assert one.serves("ja")
                await becomes(lambda: two.serves("ja"))
                assert await two.holds(2)
                await _counts_again(lambda: limits.take(ask))


async def _asks_until(take: Callable[[], Any], until: Callable[[], bool]) -> list[Any]:
    """Call `take` until the condition holds, and return what `take` returned."""
    answers = []
    async with asyncio.timeout(300):
        while not until():
            answers.append(await take())
            await asyncio.sleep(0.01)
    return answers


async def _counts_again(take: Callable[[], Any]) -> None:
    """Call `take` until Redis answers. A Redis that is up may still exceed the timeout once."""
    async with asyncio.timeout(300):
        while await take() is None:
            await asyncio.sleep(0.01)


# Redis Sentinel


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_sentinels_replace_the_master(how: str, tmp_path: Path) -> None:
    """Acknowledged changes survive a failover, and further changes and notices still work."""
    ask = limit_request("t", requests=1000)
    with running_sentinels() as fleet:
        async with gateway(tmp_path / "1", fleet) as one, gateway(tmp_path / "2", fleet) as two:
            async with SharedLimits(fleet.url) as limits:
                await one.registry.add("zh", "demo", content(1), "test")
                await becomes(lambda: two.serves("zh"))
                master = fleet.master()
                assert master is not None
                if how == "killed":
                    master.kill()
                else:
                    os.kill(master.pid, signal.SIGSTOP)
                answers = await _asks_until(
                    lambda: limits.take(ask), lambda: not one.store.stats.redis_up
                )
                assert None in answers, "they waited for Redis to come back"
                await one.registry.add("ja", "demo", content(2), "test")
                await becomes(lambda: two.serves("ja"))
                await _counts_again(lambda: limits.take(ask))
                new = await asyncio.to_thread(fleet.master)
                assert new is not None
                assert new is not master
                assert set(new.client().hkeys("lora:names")) > {b"zh", b"ja"}

                await becomes(lambda: int(new.client().pubsub_numsub("lora:changes")[0][1]) == 2)
                before = two.store.stats.notices
                await one.registry.add("ko", "demo", content(3), "test")
                await becomes(lambda: two.serves("ko"))
                await becomes(lambda: two.store.stats.notices > before)
                for number in (1, 2, 3):
                    assert await two.holds(number)


async def test_a_promotion_without_a_crash_loses_nothing(tmp_path: Path) -> None:
    """Writes go to the new master, although the old master still accepts writes."""
    async with contextlib.AsyncExitStack() as stack:
        sentinels = stack.enter_context(running_sentinels(stubborn=True))
        one = await stack.enter_async_context(gateway(tmp_path / "1", sentinels))
        two = await stack.enter_async_context(gateway(tmp_path / "2", sentinels))
        await one.registry.add("zh", "demo", content(1), "test")
        old = await asyncio.to_thread(sentinels.master)
        assert old is not None
        sentinels.sentinels[0].client().execute_command("SENTINEL", "FAILOVER", "gate way")
        await asyncio.to_thread(until, lambda: sentinels.master() not in (None, old))
        new = await asyncio.to_thread(sentinels.master)
        assert new is not None
        await one.registry.add("ja", "demo", content(2), "test")
        await becomes(lambda: new.client().hexists("lora:names", "ja"))
        await becomes(lambda: two.serves("ja"))
        await becomes(lambda: int(new.client().pubsub_numsub("lora:changes")[0][1]) == 2)
        assert await two.holds(2)
        assert is_master(old)


def test_without_sentinels_no_server_is_taken_for_the_primary() -> None:
    """Even an open connection is refused: its server may have been demoted meanwhile."""
    with running_sentinels() as fleet:
        settings = RedisSettings(fleet.url, timeout_s=PATIENT_S)
        with contextlib.closing(RedisTier(settings)) as tier:
            assert tier.position() == (None, None)
            for sentinel in fleet.sentinels:
                sentinel.kill()
            until(lambda: "no sentinel answers" in _failure(tier))
            assert "no sentinel answers" in _failure(tier)


def _failure(tier: RedisTier) -> str:
    try:
        tier.position()
    except StoreUnavailable as error:
        return str(error)
    return ""


async def test_a_server_that_hangs_is_not_listened_to_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lora_store.redis._LISTEN_CHECK_S", 0.1)
    clock = EventClock()
    with (
        running_redis() as server,
        server.client() as client,
        contextlib.closing(RedisTier(server.settings(timeout_s=600))) as tier,
    ):
        client.config_resetstat()
        listener = asyncio.ensure_future(anext(tier.listen()))
        # An idle server is pinged, and the listener stays connected as long as it answers.
        await becomes(lambda: _pings(client) >= 3)
        assert not listener.done()
        server.signal(signal.SIGSTOP)
        while not listener.done():  # the retry waits for the timeout too
            clock.leap(600)
            await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable, match="silent"):
            await listener


def _pings(client: Redis) -> int:
    """Return how many PING commands the server has received."""
    return int(client.info("commandstats").get("cmdstat_ping", {}).get("calls", 0))


def test_no_sentinel_and_no_cluster_is_away_and_says_no_password() -> None:
    for url in (
        f"redis+sentinel://:{PASSWORD}@127.0.0.1:1,127.0.0.1:2/main?sentinel_password=hidden",
        f"redis+cluster://:{PASSWORD}@127.0.0.1:1,127.0.0.1:2",
    ):
        with contextlib.closing(RedisTier(RedisSettings(url, timeout_s=0.5))) as tier:
            with pytest.raises(StoreUnavailable) as caught:
                tier.position()
        for secret in (PASSWORD, "p@ss", "hidden"):
            assert secret not in str(caught.value)


# The gateway process


@pytest.mark.parametrize("kind", ["sentinels", "cluster"])
def test_a_gateway_shares_adapters_and_limits(
    kind: str, stack: Stack, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fleet: Fleet = request.getfixturevalue(kind)
    # a fresh tenant per run: the limits of the last one stay in Redis for a minute
    name = f"e2e-{uuid4().hex}"
    config = write_config(tmp_path / "c.yaml", tenant(name, "sk-e2e", requests_per_minute=6))
    folder = write_adapter(tmp_path / "peft", DEMO_MODEL, seed=1)
    with (
        GatewayProcess(
            tmp_path,
            stack,
            config=config,
            redis_url=fleet.url,
            redis_timeout=PATIENT_S,
            admin_key=ADMIN_KEY,
        ) as process,
        process.client(ADMIN_KEY) as admin,
        process.client("sk-e2e") as client,
    ):
        files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
        added = admin.post("/v1/adapters", data={"name": "mine", "base": "demo"}, files=files)
        assert added.status_code == 201, added.text
        asked = body(model="mine", max_tokens=4)
        answers = [client.post("/v1/completions", json=asked).status_code for _ in range(20)]
        assert answers == [200] * 6 + [429] * 14
        keys = {key for server in fleet.servers for key in server.client().keys("*")}
        assert {b"lora:demo:names", b"limits:{%s}" % name.encode()} < keys
        assert [key for key in keys if key.startswith(b"lora:demo:version:")]
        assert PASSWORD not in process.text
        assert "p@ss" not in process.text
