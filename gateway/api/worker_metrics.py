"""The metrics of all workers in one answer: a scrape reaches any one of them."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.http.workers import Worker

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


async def of_all_workers(worker: Worker, own: str) -> str:
    """`own`, the metrics of this worker, with those of the others; each has a label `worker`.

    A worker that does not answer (it is starting, or stuck) is left out.
    """
    others = await asyncio.gather(*[_ask(path) for path in worker.siblings])
    texts = {worker.index: own}
    for path, text in zip(worker.siblings, others, strict=True):
        if text is not None:
            texts[int(path.stem)] = text
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry).decode()


async def _ask(path: Path) -> str | None:
    try:
        return await asyncio.to_thread(_read, path)
    except (OSError, HTTPException) as error:
        log.warning("worker %s gave no metrics: %r", path.stem, error)
        return None


def _read(path: Path) -> str:
    """Raises OSError, and HTTPException for what is no answer.

    The standard library's client: importing httpx takes a tenth of a gateway's start.
    """
    with closing(HTTPConnection("worker")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_TIMEOUT_S)
        connection.sock.connect(str(path))
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


class _Merged(Collector):
    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for index, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "worker": str(index)}
                    merged.samples.append(sample._replace(labels=labels))
        return list(families.values())
