"""Metrics of several workers, joined on one page."""

from __future__ import annotations

import time

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.api.operations.worker_metrics import add_worker
from gateway.metrics.metrics import Metrics

TENANTS = 500
STRANGE = 'a"b\\c} 1.0 # HELP \n# HELP x'

Sample = tuple[str, frozenset[tuple[str, str]], float]


def _metrics(tenants: int) -> Metrics:
    metrics = Metrics()
    metrics.requests.labels("/v1/completions", "200").inc(3)
    metrics.in_flight.inc()
    metrics.for_model("demo").duration.observe(0.2)
    for number in range(tenants):
        for kind in ("prompt", "cached", "completion"):
            metrics.tenant_tokens.labels(f"{STRANGE}{number}", "demo", "", kind).inc(5)
    return metrics


def _page(texts: dict[int, str]) -> str:
    families: dict[str, list[str]] = {}
    for index, text in texts.items():
        add_worker(families, text, index)
    return "".join([f"{line}\n" for lines in families.values() for line in lines])


def _samples(text: str, **more: str) -> set[Sample]:
    return {
        (sample.name, frozenset({**sample.labels, **more}.items()), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_metric_comes_once_with_what_each_worker_has_of_it() -> None:
    texts = {n: generate_latest(_metrics(tenants=n).registry).decode() for n in range(3)}
    page = _page(texts)
    wanted = set[Sample]().union(*[_samples(text, worker=str(n)) for n, text in texts.items()])
    assert len(wanted) > 100
    assert _samples(page) == wanted
    heads = [line for line in page.splitlines() if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)) == texts[2].count("# TYPE ")


def test_to_join_pages_takes_less_than_to_write_one() -> None:
    """Joining must be cheap: it blocks the event loop, and admin ports need no key for a scrape."""
    registry = _metrics(TENANTS).registry
    writing, joining = [], []
    for _ in range(5):
        began = time.process_time()
        text = generate_latest(registry).decode()
        written = time.process_time()
        _page(dict.fromkeys(range(4), text))
        writing.append(written - began)
        joining.append(time.process_time() - written)
    assert min(joining) < min(writing)
