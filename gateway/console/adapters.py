"""LoRA adapters for the console: on which replicas each adapter is loaded, as one worker knows it.

Most adapters are usually in no engine's cache. If engines get adapters as uploads, the JSON
description of an adapter therefore lists only the replicas that have loaded or evicted the adapter.
The computation takes milliseconds for a thousand adapters. It regularly yields to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from adapters.record import SHORT_DIGEST, Record, Version
from gateway.catalog.placement import COMING, HELD
from gateway.scheduling.replica import Replica
from gateway.service import Service

MAX_ADAPTERS = 2000
"""Maximum number of adapters that the console lists. Further adapters are only counted."""
_YIELD_EVERY = 100
_MAX_REASON_CHARS = 200

Cell = dict[str, object]


class AdapterFacts:
    """Builder of the JSON descriptions of adapters, for the console.

    Some fields depend only on the adapter's `Record` (its list of versions). They are cached, and
    computed again when the adapter has a new record.
    """

    def __init__(self) -> None:
        self._cache: dict[str, tuple[Record, dict[str, object]]] = {}

    async def collect(
        self, service: Service, rates: Mapping[str, float], *, complete: bool
    ) -> dict[str, dict[str, object]]:
        """Return a JSON description of each adapter, by name.

        If `complete` is False, omit the fields that are the same in all workers. Only one worker
        needs to add these fields to the merged data.
        """
        records = service.adapters.records[:MAX_ADAPTERS]
        replicas = list({replica.endpoint: replica for replica in service.replicas}.values())
        cells = _find_cells(records, replicas)
        found: dict[str, dict[str, object]] = {}
        for number, record in enumerate(records):
            if number % _YIELD_EVERY == _YIELD_EVERY - 1:
                await asyncio.sleep(0)
            facts: dict[str, object] = {}
            if complete:
                facts |= self._describe(record)
            if (rate := rates.get(record.name)) is not None:
                facts["requests_per_minute"] = rate
            own = cells.get(record.name, {})
            for replica in replicas:
                if (cell := _find_disk_cell(service, record.version, replica)) is not None:
                    own[replica.endpoint] = cell
            if own or complete:
                facts["replicas"] = own
            if facts:
                found[record.name] = facts
        if len(self._cache) > 2 * len(found) + _YIELD_EVERY:
            self._cache.clear()
        return found

    def _describe(self, record: Record) -> dict[str, object]:
        cached = self._cache.get(record.name)
        if cached is None or cached[0] is not record:
            versions = {v.digest[:SHORT_DIGEST]: _describe_version(v) for v in record.versions}
            facts: dict[str, object] = {
                "served": record.version.digest[:SHORT_DIGEST],
                "versions": versions,
            }
            if record.earlier:
                facts["before"] = record.earlier[-1][:SHORT_DIGEST]
            cached = self._cache[record.name] = record, facts
        return cached[1]


def _describe_version(version: Version) -> dict[str, object]:
    facts: dict[str, object] = {
        "bytes": version.nbytes,
        "rank": version.rank,
        "created": round(version.created, 2),
        "source": version.source,
    }
    if version.added_by is not None:
        facts["added_by"] = version.added_by
    return facts


def _find_cells(records: list[Record], replicas: list[Replica]) -> dict[str, dict[str, Cell]]:
    """Return the state of adapters in the engines' caches, by adapter name and replica endpoint.

    Only engines to which the gateway uploads adapters are listed, and only adapters that an engine
    has loaded or evicted. An entry has two fields:

    - "state": state of the adapter's served version: "held" (in the cache), "loading", or "cold"
      (evicted). Adapters with the same weights share a cache entry, and have the same state.
    - "evicted": number of evictions of all versions of the adapter.
    """
    names, served = defaultdict[int, set[str]](set), defaultdict[int, set[str]](set)
    for record in records:
        served[record.version.task_id].add(record.name)
        for version in record.versions:
            names[version.task_id].add(record.name)
    cells: dict[str, dict[str, Cell]] = {}
    for replica in replicas:
        residency = replica.engine.residency
        for task_id, count in residency.evictions.items():
            for name in names.get(task_id, ()):
                cell = cells.setdefault(name, {}).setdefault(replica.endpoint, {"state": "cold"})
                before = cell.get("evicted", 0)
                assert isinstance(before, int)
                cell["evicted"] = before + count
        for state, task_ids in (("held", residency.resident), ("loading", residency.loading)):
            for task_id in served.keys() & task_ids:
                for name in served[task_id]:
                    own = cells.setdefault(name, {})
                    own.setdefault(replica.endpoint, {})["state"] = state
    return cells


def _find_disk_cell(service: Service, version: Version, replica: Replica) -> Cell | None:
    """Return the state of an adapter version on a replica's disk: "held", "loading" or "lacking".

    Return None if the replica does not read adapters from its disk.
    """
    selection = replica.engine.last_selection
    if selection is None or not selection.capabilities.reads_adapters:
        return None
    state = service.adapters.disks.placement.state(version.weights, replica.endpoint)
    if state == HELD:
        return {"state": "held"}
    if state == COMING:
        return {"state": "loading"}
    return {"state": "lacking", "why": state.removeprefix("not held: ")[:_MAX_REASON_CHARS]}
