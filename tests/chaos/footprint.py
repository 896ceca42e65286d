"""Memory and open files of the run's processes, by type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from tests.chaos.world import World


@dataclass(frozen=True)
class Footprint:
    """The largest values among processes of one type: resident bytes, and open files."""

    rss: int
    files: int


def footprints(world: World) -> Mapping[str, Footprint]:
    gateways = [psutil.Process(gateway.process.process.pid) for gateway in world.gateways]
    tritons = [psutil.Process(replica.pid) for replica in world.tritons.replicas]
    kinds = {
        "gateway": gateways,
        "worker": [worker for gateway in world.gateways for worker in gateway.workers()],
        "triton": tritons,
        "model": [child for triton in tritons for child in triton.children(recursive=True)],
        "redis": [psutil.Process(world.redis.pid)],
    }
    return {kind: _largest(processes) for kind, processes in kinds.items()}


def _largest(processes: list[psutil.Process]) -> Footprint:
    return Footprint(
        max(process.memory_info().rss for process in processes),
        max(process.num_fds() for process in processes),
    )
