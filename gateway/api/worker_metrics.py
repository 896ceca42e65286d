"""The metrics of all workers in one answer: a scrape reaches any one of them."""

from __future__ import annotations

import asyncio

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.api.siblings import ask
from gateway.http.workers import Worker


async def of_all_workers(worker: Worker, own: str) -> str:
    """`own`, the metrics of this worker, with those of the others; each has a label `worker`.

    A worker that does not answer (it is starting, or stuck) is left out.
    """
    others = await asyncio.gather(*[ask(path, "/metrics") for path in worker.siblings])
    texts = {worker.index: own}
    for path, said in zip(worker.siblings, others, strict=True):
        if said is not None:
            texts[int(path.stem)] = said.body.decode()
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry).decode()


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
