"""A chaos run from the first start to the table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from tests.chaos import checks
from tests.chaos.acts import ACTS, break_things
from tests.chaos.clients import CLIENTS, Load
from tests.chaos.footprint import footprints
from tests.chaos.report import Report, report
from tests.chaos.world import learn, running_world

_CALM_S = 5.0


async def run(
    folder: Path,
    seconds: float,
    seed: int,
    acts: Iterable[str] = ACTS,
    *,
    clients: int = CLIENTS,
    **settings: object,
) -> Report:
    """Run chaos with each of `acts` at least once, and return the report.

    `folder` receives logs and all data of the servers. `settings` are the gateways'. Raises
    AssertionError if the servers do not become idle.
    """
    with running_world(folder, seed, **settings) as world:
        await learn(world)
        calm, chaos = (Load(world, name, clients) for name in ("calm", "chaos"))
        async with calm.running():
            await asyncio.sleep(_CALM_S)
        await checks.settle(world)
        before = footprints(world)
        async with chaos.running():
            await break_things(world, chaos, seconds, acts)
        await checks.settle(world)
        await checks.check_complete(world)
        await checks.settle(world)
        return report(world, calm.seen, chaos.seen, before, footprints(world))
