"""A parser of Prometheus pages."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import PATIENCE_S


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and at least these labels, or 0 without any."""
    return sample(httpx.get(url, timeout=PATIENCE_S).text, name, **labels)


def sample(page: str, name: str, **labels: str) -> float:
    """Return the sum like `metric`, for the text of a page."""
    return sum(
        found.value
        for family in text_string_to_metric_families(page)
        for found in family.samples
        if found.name == name and labels.items() <= found.labels.items()
    )
