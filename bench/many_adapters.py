"""Measure the CPU time of a gateway's start with many adapters, for three states of Redis.

    python -m bench.many_adapters [ADAPTERS]

`empty`: Redis has none of the adapters, and the gateway uploads all. `same`: Redis has all of them.
`full`: Redis has none and refuses all writes; this case is measured for 12 s. The adapters have
only 8 KiB of weights, so most of the CPU time is for comparing the list of adapters with Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from adapters.adapter import make_converted
from adapters.record import Record, Version
from lora_store.disk import Disk
from lora_store.redis import RedisSettings, RedisTier
from lora_store.tiered import TieredStore
from ops.local_stack.binaries import find_redis_server

_FULL_S = 12.0
_AFTER_S = 4.0  # the comparison has ended by then
_ROWS = [(1, layer, 4) for layer in range(8)]


def _fill(root: Path, adapters: int) -> None:
    disk = Disk(root)
    for number in range(1, adapters + 1):
        weights = number.to_bytes(8, "big") * 1024
        converted = make_converted("float16", _ROWS, 512, weights)
        version = Version.of(converted, "demo", 1.0, "bench", number)
        disk.put(converted)
        disk.put_record(
            Record(
                name=f"tenant/adapter-{number}",
                life=1,
                revision=1,
                updated=1.0,
                served=version.digest,
                versions=(version,),
            )
        )


async def _start(root: Path, url: str, adapters: int, *, full: bool) -> None:
    """Start an adapter store, and wait until it has sent all adapters to Redis.

    If `full` is True, Redis refuses the writes, so wait for `_FULL_S` seconds instead.
    """
    tier = RedisTier(RedisSettings(url, timeout_s=30))
    async with TieredStore(Disk(root), tier, memory_bytes=2**20):
        until = time.monotonic() + _FULL_S
        is_over = False
        while not is_over:
            await asyncio.sleep(0.5)
            if full:
                is_over = time.monotonic() >= until
            else:
                is_over = not await asyncio.to_thread(_lacks, url, adapters)
        await asyncio.sleep(_AFTER_S)


def _lacks(url: str, adapters: int) -> bool:
    with redis.Redis.from_url(url) as client:
        return client.dbsize() < 2 * adapters


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _measure(name: str, root: Path, at_redis: redis.Redis, url: str, adapters: int) -> None:
    at_redis.config_resetstat()
    redis_before, before = at_redis.info("cpu"), _cpu_s()
    asyncio.run(_start(root, url, adapters, full=name == "full"))
    used, of_redis = _cpu_s() - before, at_redis.info("cpu")
    redis_s = sum(of_redis[key] - redis_before[key] for key in ("used_cpu_user", "used_cpu_sys"))
    sent = at_redis.info("stats")["total_net_input_bytes"] / 2**20
    print(
        f"{name:6} gateway {used:6.2f} s  Redis {redis_s:5.2f} s  sent {sent:7.2f} MiB", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.many_adapters", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "adapters", nargs="?", type=int, default=10_000, help="number of adapters; default 10000"
    )
    adapters = parser.parse_args().adapters
    with tempfile.TemporaryDirectory(prefix="many-") as folder:
        root, socket = Path(folder) / "store", f"{folder}/redis.sock"
        _fill(root, adapters)
        command = [find_redis_server(), "--port", "0", "--unixsocket", socket, "--save", ""]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            url = f"unix://{socket}"
            while not Path(socket).exists():
                time.sleep(0.05)
            with redis.Redis.from_url(url) as at_redis:
                for name in ("empty", "same", "same"):
                    _measure(name, root, at_redis, url, adapters)
                at_redis.flushall()
                at_redis.config_set("maxmemory", 1)
                _measure("full", root, at_redis, url, adapters)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
