"""CPU time on the event loop's thread for a console with many adapters, replicas and requests."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import orjson

from adapters.adapter import ModuleRows
from adapters.record import Record, Version
from adapters.registry import Snapshot
from gateway.console.patch import apply_patch, difference
from gateway.generation.batch import Batch
from gateway.generation.options import Caller
from gateway.observability.request_context import RequestContext
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

ADAPTERS, REPLICAS, REQUESTS = 1000, 20, 1000
# Limits in CPU seconds per update, one update a second. Idle machines took 0.03 and 0.01.
STATE_S, CHANGE_S = 0.2, 0.05


def _record(number: int) -> Record:
    digest = f"{number:064x}"
    version = Version(
        digest=digest,
        weights=digest,
        base="m",
        dtype="float16",
        created=1.0,
        nbytes=1000,
        modules=(ModuleRows("attn_q", 8, (0, 1)),),
        source="upload",
        task_id=number + 1,
    )
    name = f"adapter-{number}"
    return Record(name=name, life=1, revision=1, updated=1.0, served=digest, versions=(version,))


def _batch(number: int) -> Batch:
    return Batch(
        request_id=f"{number:032x}",
        generations=[],
        prompts=1,
        choices=1,
        prompt_tokens=100,
        fingerprint="",
        caller=Caller(),
        timeout_s=60.0,
        deadline=60.0,
    )


class _Growing:
    """A choice whose number of tokens grows each time it is read."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    @property
    def tokens(self) -> int:
        return next(self._looks)

    def cut_short(self) -> None:
        """Do nothing."""


async def test_a_thousand_adapters_at_twenty_replicas_and_a_thousand_requests(
    tmp_path: Path,
) -> None:
    save_tokenizer(tmp_path)
    engine = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    async with (
        serving(engine, "0.0.0.0:0") as endpoint,
        running(tmp_path, _twenty(endpoint)) as (_, service, server),
    ):
        snapshot = Snapshot.of([_record(number) for number in range(ADAPTERS)])
        service.adapters.registry.snapshot = snapshot
        for place, replica in enumerate(service.replicas):
            residency = replica.engine.residency
            for task_id in range(1, ADAPTERS + 1):
                if (task_id + place) % 2:
                    assert await residency.acquire_upload(task_id)
                    residency.mark_loaded(task_id)
                else:
                    residency.mark_evicted(task_id)
        requests = service.monitor.requests
        for number in range(REQUESTS):
            batch = _batch(number)
            batch.meter.running.append(_Growing())
            requests.begin(RequestContext(f"r{number}", model="m", path="/v1/completions"), batch)
        for number in range(360):
            service.monitor.history.step(number * 10.0, 0, 0, 0)
        console = server.application.api.state.console

        spent: list[float] = []
        made: list[dict[str, Any]] = []
        for _ in range(5):
            began = time.thread_time()
            made.append(await console._build_state())
            spent.append(time.thread_time() - began)
        began = time.thread_time()
        change = difference(made[-2], made[-1])
        changing = time.thread_time() - began
        whole, part = len(orjson.dumps(made[-1])), len(orjson.dumps(change))
        print(f"state: {min(spent):.3f} s of CPU, {whole:,} bytes")
        print(f"change: {changing:.3f} s, {part:,} bytes")
        assert len(made[-1]["adapters"]) == ADAPTERS
        assert sum(len(a["replicas"]) for a in made[-1]["adapters"].values()) == ADAPTERS * REPLICAS
        assert len(made[-1]["requests"]) == REQUESTS
        assert apply_patch(made[-2], change) == made[-1]
        assert set(change) <= {"time", "requests", "replicas"}
        assert part < whole / 10
        assert min(spent) < STATE_S
        assert changing < CHANGE_S
        for watched in list(requests):
            requests.remove(watched)


def _twenty(endpoint: str) -> str:
    """Return `REPLICAS` addresses of one server, each with another loopback address."""
    port = endpoint.rpartition(":")[2]
    return ",".join(f"127.0.0.{number}:{port}" for number in range(1, REPLICAS + 1))
