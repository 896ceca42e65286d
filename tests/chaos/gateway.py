"""A gateway of the chaos run, and actions on its processes, disk, usage log and clock."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.clock import WallClock
from tests.support.cluster import Tritons
from tests.support.gateway_process import GatewayProcess

WORKERS = 2
_ENDS_WITHIN_S, _SERVES_WITHIN_S = 60.0, 120.0
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""TLS context shared by all httpx clients. Each would otherwise read all CA files in 60 ms."""


@dataclass
class Outage:
    """A period in which connections may break, from a kill to the successor's first answers."""

    started: float
    ended: float = float("inf")


@dataclass
class Gateway:
    """A gateway. `outages` have times of `time.monotonic`."""

    name: str
    folder: Path
    process: GatewayProcess
    clock: WallClock
    log: Path
    outages: list[Outage] = field(default_factory=list)
    lost_lines: int = 0
    """Usage log lines that the gateway reported as lost while its disk was full."""
    _deleted: list[str] = field(default_factory=list)
    """Contents of the usage log files when they were deleted."""

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def store(self) -> Path:
        """Folder of the gateway's adapters for the base model `demo`."""
        return self.folder / "adapters" / "demo"

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.process.pid).children()

    def metrics(self) -> defaultdict[str, float]:
        """Return metrics by name, 0 by default. Values are summed over labels and responding
        workers.
        """
        found: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(self.metrics_page()):
            for sample in family.samples:
                found[sample.name] += sample.value
        return found

    def metrics_page(self) -> str:
        """Return the metrics page, or "" if no worker responds."""
        url = f"http://127.0.0.1:{self.process.admin_port}/metrics"
        try:
            return httpx.get(url, timeout=20, verify=PLAIN).text
        except httpx.TransportError:
            return ""

    async def serves_again(self) -> dict[str, float]:
        """Wait until all workers see a ready engine. Return the metrics."""
        deadline = time.monotonic() + _SERVES_WITHIN_S
        while (found := await asyncio.to_thread(self.metrics))["gateway_engine_ready"] < WORKERS:
            assert time.monotonic() < deadline, self.process.text[-5000:]
            await asyncio.sleep(0.2)
        return found

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Record an outage for the duration of the context."""
        outage = Outage(time.monotonic())
        self.outages.append(outage)
        yield
        outage.ended = time.monotonic()

    def was_out(self, started: float, ended: float) -> bool:
        """Return True if an outage overlaps the given period, with a margin of a second."""
        return any(o.started - 1 <= ended and started <= o.ended + 1 for o in self.outages)

    # Actions

    async def kill(self) -> None:
        """Kill only the parent process. Its workers must end by themselves."""
        workers = self.workers()
        self.process.process.kill()
        self.process.process.wait()
        _, left = await asyncio.to_thread(psutil.wait_procs, workers, _ENDS_WITHIN_S)
        assert not left, f"workers outlive their parent: {left}"

    async def start(self) -> None:
        """Start the gateway again with its previous ports and folders."""
        await asyncio.to_thread(self.process.__enter__)

    def hang_up(self) -> None:
        self.process.process.send_signal(signal.SIGHUP)

    @asynccontextmanager
    async def full_disk(self, room: int) -> AsyncIterator[None]:
        """Limit all files of the workers to the usage log's size plus `room` bytes.

        Usage log lines reported as lost in that time are added to `lost_lines`.
        """
        workers, before = self.workers(), await self._lost()
        limits = {worker: worker.rlimit(psutil.RLIMIT_FSIZE) for worker in workers}
        size = self.log.stat().st_size if self.log.exists() else 0
        for worker, (_, hard) in limits.items():
            worker.rlimit(psutil.RLIMIT_FSIZE, (size + room, hard))
        try:
            yield
        finally:
            for worker, limit in limits.items():
                worker.rlimit(psutil.RLIMIT_FSIZE, limit)
        self.lost_lines += await self._lost() - before

    async def _lost(self) -> int:
        return int((await self.serves_again())["gateway_usage_records_lost_total"])

    def rename_log(self) -> None:
        self.log.rename(self.log.with_suffix(f".{time.monotonic_ns()}"))

    async def delete_log(self) -> None:
        """Delete the usage log, and return once no worker has the deleted file open.

        A worker that is killed before would lose its lines. All lines that the workers write to the
        deleted file must be in the next file too.
        """
        with self.log.open(encoding="utf-8") as file:
            self.log.unlink()
            whole, end, _ = file.read().rpartition("\n")
        self._deleted.append(whole + end)
        deadline = time.monotonic() + _SERVES_WITHIN_S
        while not all(self._writes_to_log(worker) for worker in self.workers()):
            assert time.monotonic() < deadline, f"{self.name} writes to a usage log that is gone"
            await asyncio.sleep(0.1)

    def _writes_to_log(self, worker: psutil.Process) -> bool:
        return str(self.log) in {file.path for file in worker.open_files()}

    def records(self) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Yield each usage log file's records and False, then each deleted file's and True."""
        for path in sorted(self.log.parent.glob(f"{self.log.stem}.*")):
            yield _records(path.read_text(encoding="utf-8")), False
        for text in self._deleted:
            yield _records(text), True


def _records(text: str) -> list[dict[str, Any]]:
    """Parse the lines. A truncated line was replaced by an empty one."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


@contextmanager
def running_gateways(
    names: Iterable[str], folder: Path, tritons: Tritons, **settings: object
) -> Iterator[list[Gateway]]:
    """Run gateways with separate folders and usage logs, and end them with the context."""
    made = [_gateway(name, folder / name, tritons, settings) for name in names]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda gateway: stack.enter_context(gateway.process), made):
            pass
        yield made


def _gateway(name: str, folder: Path, tritons: Tritons, settings: Mapping[str, object]) -> Gateway:
    log = folder / "usage" / "log.jsonl"
    log.parent.mkdir(parents=True)
    clock = WallClock(folder / "clock")
    more = {"usage_log": log, "workers": WORKERS, **settings}
    process = GatewayProcess(folder, tritons, clock.environment, **more)
    return Gateway(name, folder, process, clock, log)
