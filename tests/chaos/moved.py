"""Move the address of Redis under load: when is it noticed, and is anything lost?

    python -m tests.chaos.moved [--kind "redis 7" ...] [--failover "one address" ...] [--out DIR]

Two gateways of two workers with one PostgreSQL, a real Triton, and for each case separate Redis
servers, of which another becomes the primary. The exit code is 1 when a promise was broken. Times
are in seconds from the moment when clients are directed to another server: by the address, or by
most sentinels.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ops.commands.up import DEMO_ADAPTERS
from tests.chaos import adapters
from tests.chaos.adapters import ADMIN_KEY, LIVE
from tests.chaos.gateway import Gateway, running_gateways
from tests.chaos.moved_users import KEY, NEED_NO_REDIS, Users
from tests.support.cluster import Tritons, demo_engine, tritons
from tests.support.gateway_process import tenant, write_config
from tests.support.moved_redis import (
    FAILOVERS,
    KINDS,
    MovedRedis,
    WatchedRedis,
    binaries,
    clients_at,
    why_missing,
)
from tests.support.postgresql_server import running_postgresql
from tests.support.redis_fleet import Process
from tests.support.upgraded_database import upgrade_database

NOTICED_WITHIN_S = 5.0
_RECOVERED_WITHIN_S = 30.0
_CLIENTS = 6
_REQUESTS = 20
"""Limit of requests per minute for a tenant."""
_BEFORE = 12
_CHANGES = 3
_APART_S = 5.0
_TIGHT = ("before", "across", "after")


@dataclass
class Case:
    """A server type and failover with the measured results. `broken` yields the broken promises."""

    kind: str
    failover: str
    noticed_s: float = 0.0
    last: list[str] = field(default_factory=list)
    """Last commands of the clients that left the old server last."""
    failures: dict[str, int] = field(default_factory=dict)
    recovered_s: dict[str, float] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    let_in: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    refused: int = 0
    """Chats refused because the adapter version was only in Redis, which was unavailable."""
    errors: list[str] = field(default_factory=list)
    unshared: int = 0
    """Uploads that were answered with 201 and `"shared": false`."""
    old: int = 0
    certain: int = 0

    def count(self, users: Users, since: float) -> None:
        """Count the chats' answers. The served version is known for those after `since`."""
        self.old, self.certain = users.old_answers(since)
        self.answers = len(users.answers)
        self.refused = sum(answer.is_refused for answer in users.answers)
        self.errors = [
            f"{answer.status}: {answer.error}"
            for answer in users.answers
            if answer.status != 200 and not answer.is_refused
        ]

    def broken(self) -> Iterator[str]:
        """Yield each broken promise, including times and refusals, which depend on the machine."""
        name = f"{self.kind}, {self.failover}"
        if self.noticed_s > NOTICED_WITHIN_S:
            yield f"{name}: noticed after {self.noticed_s:.1f} s: {', '.join(self.last)}"
        if any(count < _REQUESTS for count in self.let_in.values()):
            yield f"{name}: fewer than {_REQUESTS} a minute were let in: {self.let_in}"
        if failed := {user: n for user, n in self.failures.items() if n and user in NEED_NO_REDIS}:
            yield f"{name}: changes that need no Redis failed: {failed}"
        yield from self.wrong()

    def wrong(self) -> Iterator[str]:
        """Yield each broken promise that a busy machine cannot cause."""
        name = f"{self.kind}, {self.failover}"
        if self.old or not self.certain:
            yield f"{name}: {self.old} of {self.certain} answers were of an old version"
        if any(self.lost.values()):
            yield f"{name}: lost {self.lost}"
        if self.errors:
            yield f"{name}: {len(self.errors)} requests were not answered: {self.errors[0]}"
        if any(count > _REQUESTS for count in self.let_in.values()):
            yield f"{name}: more than {_REQUESTS} a minute were let in: {self.let_in}"


def run(folder: Path, kinds: Sequence[str], failovers: Sequence[str]) -> list[Case]:
    """Run all cases and return them. `folder` receives the logs."""
    cases = []
    with (
        tritons(folder, demo_engine(folder / "engine"), 1) as triton,
        running_postgresql() as postgresql,
    ):
        for kind in kinds:
            for failover in failovers:
                case = Case(kind, failover)
                place = folder / f"{kind}-{failover}".replace(" ", "-")
                place.mkdir()
                print(f"{time.strftime('%X')} {kind}, {failover}", flush=True)
                with (
                    FAILOVERS[failover](binaries()[kind]) as redis,
                    postgresql.database() as database,
                    _gateways(place, triton, redis, database) as gateways,
                ):
                    endpoint = triton.replicas[0].endpoint
                    asyncio.run(_case(case, gateways, redis, endpoint))
                cases.append(case)
    return cases


def _gateways(
    folder: Path, triton: Tritons, redis: MovedRedis | WatchedRedis, database: str
) -> AbstractContextManager[list[Gateway]]:
    tight = [
        tenant(name, f"sk-{name}-key", requests_per_minute=_REQUESTS, concurrent_requests=100)
        for name in _TIGHT
    ]
    # "refuse", because a worker that counts by itself when Redis is slow would admit too many.
    limits = {"when_redis_is_away": {"requests_per_minute": "refuse"}}
    upgrade_database(database)
    settings = {
        "config": write_config(folder / "config.yaml", tenant("acme", KEY), *tight, limits=limits),
        "admin_port": 0,
        "admin_key": ADMIN_KEY,
        "redis_url": redis.url,
        "database_url": database,
    }
    return running_gateways("ab", folder, triton, **settings)


async def _case(
    case: Case, gateways: list[Gateway], redis: MovedRedis | WatchedRedis, endpoint: str
) -> None:
    contents = {content.name: content for content in adapters.demo_contents()}
    async with Users(gateways, endpoint, contents) as users:
        assert await users.upload(0)
        assert (await adapters.wait_until_agreed(gateways))[LIVE]
        case.let_in["before"] = await users.let_in("sk-before-key", 3 * _REQUESTS)
        acting = [asyncio.create_task(user.run()) for user in users.users]
        asking = [asyncio.create_task(users.ask(number)) for number in range(_CLIENTS)]
        while not all(user.acts for user in users.users):
            await asyncio.sleep(0.1)
        across = await users.let_in("sk-across-key", _BEFORE)
        old = await asyncio.to_thread(redis.move)
        began = time.monotonic()
        await _wait_until_noticed(case, old, began)
        await _wait_until_recovered(case, users, began)
        case.let_in["across"] = across + await users.let_in("sk-across-key", 3 * _REQUESTS)
        case.let_in["after"] = await users.let_in("sk-after-key", 3 * _REQUESTS)
        for user in users.users:
            user.is_ending = True
        await asyncio.gather(*acting)
        case.unshared = sum(not upload.is_shared for upload in users.uploads)
        since = time.monotonic()
        for number in range(_CHANGES):
            assert await users.upload(number)
            await asyncio.sleep(_APART_S)
        for task in asking:
            task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        case.count(users, since)
        # A client whose connection failed sends no further requests.
        case.errors += [repr(end) for end in ends if not isinstance(end, asyncio.CancelledError)]
        case.lost = await users.lost()


async def _wait_until_noticed(case: Case, old: Process, began: float) -> None:
    """Wait until no gateway is connected to the demoted server."""
    stay: list[dict[str, str]] = []
    while found := await asyncio.to_thread(clients_at, old):
        stay = found
        assert time.monotonic() < began + _RECOVERED_WITHIN_S, f"they stay: {stay}"
        await asyncio.sleep(0.02)
    case.noticed_s = time.monotonic() - began
    case.last = [f"{each['cmd']}, idle for {each['idle']} s" for each in stay]


async def _wait_until_recovered(case: Case, users: Users, began: float) -> None:
    """Wait until each user has succeeded twice in a row since the move."""
    since = time.monotonic()
    while not all(
        (at := user.recovered_at(began)) is not None
        and user.acts[-1].started > max(at, since)
        and user.acts[-1].is_shared
        for user in users.users
    ):
        fail = [user.name for user in users.users if not user.acts[-1].is_shared]
        assert time.monotonic() < began + _RECOVERED_WITHIN_S, f"{fail} do not recover"
        await asyncio.sleep(0.1)
    for user in users.users:
        at = user.recovered_at(began)
        assert at is not None
        case.failures[user.name] = user.failures(began)
        case.recovered_s[user.name] = at - began if case.failures[user.name] else 0.0


def table(cases: Sequence[Case]) -> str:
    names = list(cases[0].recovered_s) if cases else []
    head = ["server", "failover", "noticed, s", *(f"{name}: failed, s" for name in names)]
    head += ["20 a minute", "old versions", "lost"]
    lines = [_row(head), _row(["---"] * len(head))]
    for case in cases:
        users = [f"{case.failures[name]}, {case.recovered_s[name]:.1f}" for name in names]
        limits = ", ".join(str(count) for count in case.let_in.values())
        old = f"{case.old} of {case.certain}"
        unserved = case.refused + len(case.errors)
        lost = f"{sum(case.lost.values())}, and {unserved} of {case.answers} answers"
        cells = [case.kind, case.failover, f"{case.noticed_s:.1f}", *users, limits, old, lost]
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--failover", choices=FAILOVERS, nargs="+", default=list(FAILOVERS))
    parser.add_argument("--out", type=Path, default=Path("build/moved"))
    options = parser.parse_args()
    assert DEMO_ADAPTERS.exists()
    kinds = [kind for kind in options.kind if kind in binaries()]
    for kind in options.kind:
        if kind not in kinds:
            print(f"left out: {why_missing(kind)}")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    cases = run(options.out.absolute(), kinds, options.failover)
    found = [case.__dict__ for case in cases]
    (options.out / "moved.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(cases))
    broken = [sentence for case in cases for sentence in case.broken()]
    for sentence in broken:
        print(f"BROKEN: {sentence}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
