"""The PEFT agent beside a Triton server, tested with a real Redis and gateways that come and go."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from adapters.adapter import Converted
from adapters.peft_files import peft_files
from certificates.contexts import ClientFiles
from certificates.memory_files import copy_to_memory
from lora_store.peft_folders import PeftFolders
from lora_store.redis import RedisSettings
from tests.support.adapter_store import StoreGateway, becomes, store_gateway
from tests.support.authority import Authority
from tests.support.lora_files import BASE, linear_content
from tests.support.peft_agents import AgentNotices, running_agent
from tests.support.redis_server import RedisServer

REPLICA = "triton:8001"
SIZE = peft_files(linear_content(0), BASE).nbytes
SMALL = linear_content(99, rank=1)


def _digest(number: int) -> str:
    return linear_content(number).digest


async def _add(gateway: StoreGateway, name: str, content: Converted) -> None:
    await gateway.registry.add(name, "demo", content, "test")


@pytest.fixture
def told(redis_server: RedisServer) -> Iterator[AgentNotices]:
    told = AgentNotices(redis_server.settings())
    told.notices.put_base(BASE)
    with contextlib.closing(told.notices):
        yield told


def _on_disk(root: Path) -> set[str]:
    return set(PeftFolders(root).list_versions())


async def test_it_holds_what_names_name_and_lets_go_by_agreement(
    tmp_path: Path, redis_server: RedisServer, told: AgentNotices
) -> None:
    disk = tmp_path / "disk"
    settings = redis_server.settings()
    async with store_gateway(tmp_path / "a", settings) as gateway:
        with running_agent(disk, settings, REPLICA, max_bytes=2 * SIZE):
            await _add(gateway, "zh", linear_content(1))
            await _add(gateway, "zh", linear_content(2))
            await becomes(lambda: told.holds() == {_digest(1), _digest(2)})
            [held] = told.agents().values()
            assert (held.replicas, held.path) == ((REPLICA,), str(disk))
            # Two new adapters need disk space. The agent withdraws one old version, but leaves its
            # files until every gateway has seen the withdrawal.
            told.beat()
            await gateway.registry.remove("zh")
            await _add(gateway, "ja", linear_content(3))
            await _add(gateway, "ko", linear_content(4))
            await becomes(lambda: len(told.holds()) == 1)
            [second] = told.holds()
            [first] = {_digest(1), _digest(2)} - {second}
            assert _on_disk(disk) == {first, second}
            # Meanwhile a gateway still runs a request with the second version. The agent withdraws
            # that version, and must not remove it before the request ends.
            in_use = {second: frozenset({REPLICA}), first: frozenset({"other:8001"})}

            def one_has_gone() -> bool:
                told.beat(in_use=in_use)
                return told.holds() == {_digest(4)}

            await becomes(one_has_gone)
            assert _on_disk(disk) == {second, _digest(4)}

            def the_other_too() -> bool:
                told.beat()
                return told.holds() == {_digest(3), _digest(4)}

            await becomes(the_other_too)
            assert _on_disk(disk) == {_digest(3), _digest(4)}


async def test_it_takes_renewed_certificates(tmp_path: Path, redis_server: RedisServer) -> None:
    """The agent updates the in-memory copy of a renewed certificate, which redis-py reads."""
    authority = Authority(tmp_path, "authority")
    pairs = [authority.issue("one"), authority.issue("two")]
    cert, key = tmp_path / "cert", tmp_path / "key"

    def write(number: int) -> None:
        for path, of_pair in zip((cert, key), pairs[number], strict=True):
            path.write_bytes(of_pair.read_bytes())

    write(0)
    copies = copy_to_memory("a test", ClientFiles(None, cert, key))
    assert copies.cert is not None
    copy = copies.cert
    assert cert.read_bytes() in copy.read_bytes()
    with running_agent(tmp_path / "disk", redis_server.settings(), REPLICA, max_bytes=SIZE):
        write(1)
        await becomes(lambda: cert.read_bytes() in copy.read_bytes())


async def test_a_gateway_that_is_silent_is_taken_to_use_what_it_used(
    tmp_path: Path, redis_server: RedisServer, told: AgentNotices
) -> None:
    """The agent assumes that a silent gateway still uses its last reported versions, for `grace_s`.

    After the grace period each request of that gateway has ended, on every replica.
    """
    disk = tmp_path / "disk"
    settings = redis_server.settings()
    async with store_gateway(tmp_path / "a", settings) as gateway:
        await _add(gateway, "zh", linear_content(1))
        await _add(gateway, "ja", linear_content(2))
        told.beat("silent", {_digest(1): frozenset({REPLICA})})
        bound = 2 * SIZE + peft_files(SMALL, BASE).nbytes
        with running_agent(disk, settings, REPLICA, max_bytes=bound):
            await becomes(lambda: told.holds() == {_digest(1), _digest(2)})
            await gateway.registry.remove("zh")
            await _add(gateway, "ko", linear_content(3))
            # The new version needs space, so the agent withdraws the version that no name uses now.
            await becomes(lambda: told.holds() == {_digest(2)})
            told.beat("another")
            # Removal has to wait for the silent gateway. Meanwhile a version that fits is still
            # written.
            await _add(gateway, "mi", SMALL)
            await becomes(lambda: told.holds() == {_digest(2), SMALL.digest})
            assert _on_disk(disk) == {_digest(1), _digest(2), SMALL.digest}
        with running_agent(disk, settings, REPLICA, max_bytes=bound, grace_s=2.0):

            def room_was_made() -> bool:
                told.beat("another")
                return told.holds() == {_digest(2), _digest(3), SMALL.digest}

            await becomes(room_was_made)
            assert _on_disk(disk) == {_digest(2), _digest(3), SMALL.digest}


async def test_a_gateway_that_cannot_be_read_may_name_everything(
    tmp_path: Path, redis_server: RedisServer, told: AgentNotices, at_redis: Redis
) -> None:
    """The agent removes nothing while it cannot parse the reports of a newer gateway."""
    disk = tmp_path / "disk"
    settings = redis_server.settings()
    async with store_gateway(tmp_path / "a", settings) as gateway:
        await _add(gateway, "zh", linear_content(1))
        with running_agent(disk, settings, REPLICA, max_bytes=SIZE, grace_s=2.0):
            await becomes(lambda: told.holds() == {_digest(1)})
            beats = itertools.count()

            def unreadable() -> None:
                told.beat()
                at_redis.hset("lora:peft:gateways", "newer", f"new {next(beats)}")

            unreadable()
            await gateway.registry.remove("zh")
            await _add(gateway, "ja", linear_content(2))

            def withdrawn() -> bool:
                unreadable()
                return not told.holds()

            await becomes(withdrawn)
            # Twice the grace period of a silent gateway
            ends = time.monotonic() + 4.0

            def long_ago() -> bool:
                unreadable()
                return time.monotonic() > ends

            await becomes(long_ago)
            assert _on_disk(disk) == {_digest(1)}

            def let_go() -> bool:
                told.beat()
                return told.holds() == {_digest(2)}

            await becomes(let_go)


async def test_a_flushed_redis_and_one_that_is_away_change_nothing_on_the_disk(
    tmp_path: Path, redis_server: RedisServer, told: AgentNotices, at_redis: Redis
) -> None:
    disk = tmp_path / "disk"
    settings = redis_server.settings()
    async with store_gateway(tmp_path / "a", settings) as gateway:
        for number in (1, 2, 3):
            await _add(gateway, f"a{number}", linear_content(number))
        everything = {_digest(number) for number in (1, 2, 3)}
        with running_agent(disk, settings, REPLICA, max_bytes=3 * SIZE):
            await becomes(lambda: told.holds() == everything)
            at_redis.flushall()
            # The agent reports again, and the gateways write names and versions to Redis again.
            await becomes(lambda: told.holds() == everything)
            told.notices.put_base(BASE)
            assert _on_disk(disk) == everything
            redis_server.kill()
            redis_server.start()
            await becomes(lambda: told.holds() == everything)
            told.notices.put_base(BASE)
            await _add(gateway, "a3", linear_content(3))
            assert _on_disk(disk) == everything


async def test_names_that_come_back_one_by_one_cost_the_others_nothing(
    tmp_path: Path, redis_server: RedisServer, told: AgentNotices, at_redis: Redis
) -> None:
    """Redis has lost all names, and the first gateway that comes back knows none of the old ones.

    The agent must not remove versions of the names that have not come back yet.
    """
    disk = tmp_path / "disk"
    settings = redis_server.settings()
    smaller = linear_content(98, rank=1)
    bound = 2 * SIZE + 2 * peft_files(SMALL, BASE).nbytes
    with running_agent(disk, settings, REPLICA, max_bytes=bound, settle_s=3600):
        async with store_gateway(tmp_path / "a", settings) as gateway:
            for number in (1, 2):
                await _add(gateway, f"a{number}", linear_content(number))
            await becomes(lambda: told.holds() == {_digest(1), _digest(2)})
        at_redis.flushall()
        told.notices.put_base(BASE)
        async with store_gateway(tmp_path / "b", settings) as gateway:
            # The large version would only fit in place of an old one. The two small ones, which fit
            # beside them, show that the agent has processed the new names.
            await _add(gateway, "b", linear_content(3))
            for name, small in (("mi", SMALL), ("mini", smaller)):
                await _add(gateway, name, small)
                await becomes(lambda small=small: small.digest in told.holds())
            assert told.holds() == {_digest(1), _digest(2), SMALL.digest, smaller.digest}
            assert _on_disk(disk) == told.holds()


async def test_what_redis_has_lost_is_asked_of_gateways(
    tmp_path: Path, redis_server: RedisServer, told: AgentNotices, at_redis: Redis
) -> None:
    settings = redis_server.settings()
    async with store_gateway(tmp_path / "a", settings) as gateway:
        await _add(gateway, "zh", linear_content(1))
        await becomes(lambda: at_redis.pubsub_numsub("lora:changes")[0][1] == 1)
        for key in at_redis.scan_iter("lora:version:*"):
            at_redis.delete(key)
        with running_agent(tmp_path / "disk", settings, REPLICA):
            await becomes(lambda: told.holds() == {_digest(1)})


async def test_a_corrupt_copy_in_redis_is_never_written(
    tmp_path: Path, redis_server: RedisServer, told: AgentNotices, at_redis: Redis
) -> None:
    settings = redis_server.settings()
    async with store_gateway(tmp_path / "a", settings) as gateway:
        await _add(gateway, "zh", linear_content(1))
        await becomes(lambda: at_redis.pubsub_numsub("lora:changes")[0][1] == 1)
        key = f"lora:version:{_digest(1)}:0"
        raw = at_redis.get(key)
        assert isinstance(raw, bytes)
        at_redis.set(key, raw[:-1] + bytes([raw[-1] ^ 1]))
        with running_agent(tmp_path / "disk", settings, REPLICA):
            await becomes(lambda: told.holds() == {_digest(1)})
        files = peft_files(linear_content(1), BASE)
        weights = tmp_path / "disk" / _digest(1) / "adapter_model.safetensors"
        assert weights.read_bytes() == b"".join(files.weights())


async def test_killed_at_any_moment_it_goes_on_where_it_was(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Kill the agent command at random moments: its folders stay complete and within the limit."""
    settings = RedisSettings(redis_server.url, prefix="lora:demo", timeout_s=30.0)
    told = AgentNotices(settings)
    told.notices.put_base(BASE)
    contents = [linear_content(number, rank=8) for number in range(14)]
    size = peft_files(contents[0], BASE).nbytes
    disk = tmp_path / "disk"
    command = [sys.executable, "-m", "ops", "lora", "agent", str(disk), "--replica", REPLICA]
    command += ["--max-bytes", str(10 * size), "--grace", "3600"]
    environment = {**os.environ, "GATEWAY_REDIS_URL": redis_server.url}
    async with store_gateway(tmp_path / "a", settings) as gateway:
        for number, content in enumerate(contents):
            await _add(gateway, f"a{number}", content)
        chance = random.Random(1)
        for wanted in (1, 5, 10):
            before = {held.boot for held in told.agents().values()}
            agent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            try:
                # Kill the first two agents in the middle of writing. Let only the last one finish.
                await becomes(lambda wanted=wanted: len(_on_disk(disk)) >= wanted)
                time.sleep(chance.random() / 100)
                if wanted == 10:

                    def holds_all(before: set[str] = before) -> bool:
                        found = told.agents().values()
                        return any(
                            len(held.holds) == 10 and held.boot not in before for held in found
                        )

                    # Also check `boot`: the killed agent may have reported ten versions already.
                    await becomes(holds_all)
                    agent.terminate()
                    assert agent.wait() == 0
            finally:
                agent.send_signal(signal.SIGKILL)
                agent.wait()
            held = PeftFolders(disk).list_versions()
            assert set(held.values()) == {size}
            assert sum(p.stat().st_size for p in disk.rglob("*") if p.is_file()) <= 10 * size
            for digest in held:
                [content] = [each for each in contents if each.digest == digest]
                weights = (disk / digest / "adapter_model.safetensors").read_bytes()
                assert weights == b"".join(peft_files(content, BASE).weights())
    assert not [path for path in disk.iterdir() if path.name.startswith(".") and path.is_dir()]
    # Only ten fit: the versions added last.
    assert told.holds() == {content.digest for content in contents[4:]}
    told.notices.close()
