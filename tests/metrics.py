"""Reads Prometheus pages."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of all samples with this name and at least these labels; 0 when there are none."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(httpx.get(url).text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
